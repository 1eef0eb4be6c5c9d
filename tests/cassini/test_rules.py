"""Each rule of the software Cassini, proved through libfabric's own interface by one run of the driver."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cassini.build import build, build_driver

if TYPE_CHECKING:
    from pathlib import Path

RULE_TIMEOUT_S = 60

INFO = (
    "without_hints_only_cxi_is_listed",
    "the_entry_equals_that_of_the_real_provider",
    "extras_are_given_only_on_request",
    "unsatisfiable_hints_give_no_data",
    "a_node_is_the_nic_or_a_local_address",
    "the_other_exports_of_libfabric_work",
)
MEMORY = (
    "there_is_no_key_before_a_region_is_bound_and_enabled",
    "a_region_is_one_range_of_the_hosts_memory",
    "target_addresses_are_offsets_and_end_with_the_region",
    "a_key_works_only_through_its_own_endpoint",
    "a_closed_region_accepts_no_write",
    "access_is_as_requested",
    "a_regions_counter_counts_the_writes_into_it",
    "an_arriving_write_can_fire_work",
    "no_region_is_enabled_whose_key_reaches_other_memory",
)
ENDPOINTS = (
    "an_endpoint_works_once_it_is_bound_and_enabled",
    "missing_functions_are_refused_without_a_crash",
    "invalid_operations_are_refused",
    "entries_appear_only_on_request_when_the_queue_is_read",
    "without_selective_completion_every_operation_has_an_entry",
    "the_same_address_has_the_same_number",
    "objects_in_use_do_not_close_and_none_stays_open",
)
COUNTERS = (
    "counters_add_set_and_refuse_values_out_of_range",
    "counters_open_only_with_attributes_of_cxi",
    "there_are_2047_counters",
    "a_wait_ends_at_the_count_a_failure_or_the_timeout",
    "doorbells_add_and_reset",
    "the_doorbells_length_is_less_than_a_page",
    "the_write_back_word_is_written_only_when_specified",
    "work_can_request_a_write_back_of_its_trigger",
    "a_cached_counter_returns_the_last_written_word",
    "undefined_behaviour_aborts_with_a_message",
)
WORK = (
    "fires_at_its_threshold_and_not_before",
    "a_doorbell_moves_bytes_without_any_call",
    "one_doorbell_fires_a_whole_chain",
    "a_read_can_be_deferred",
    "counters_can_be_added_to_and_set",
    "insertion_order_is_not_firing_order",
    "a_threshold_reached_already_fires_at_once",
    "a_requested_entry_has_the_context_of_its_message",
    "a_completion_counter_is_optional",
    "the_peers_address_is_taken_when_the_work_is_queued",
    "a_flush_drops_unfired_work_without_an_entry",
    "a_flush_delays_every_command_by_a_second",
)
FAILURES = (
    "a_failure_is_counted_and_reported_and_fires_nothing",
    "an_error_hides_later_entries_until_it_is_read",
    "one_bad_key_fails_one_operation",
    "more_failures_than_a_counter_holds_stop_counting",
    "a_failed_inject_is_reported_with_the_endpoints_context",
    "an_absent_peer_is_a_failure",
    "closing_an_endpoint_drops_operations_in_flight",
)
PROCESSES = (
    "one_process_puts_into_another",
    "operations_to_a_dead_process_fail",
    "another_process_can_ring_a_doorbell",
)
SLOTS = (
    "every_version_of_the_extension_reports_the_depth",
    "beyond_the_depth_there_is_no_space_in_any_domain",
    "other_processes_take_from_the_same_depth",
    "a_write_back_costs_a_second_slot",
    "a_wait_that_timed_out_keeps_its_slot",
    "requests_come_back_only_when_the_queue_is_read",
    "deferred_work_with_unsupported_flags_is_refused",
    "invalid_work_is_refused",
    "objects_needed_by_work_do_not_close",
)
SETTINGS = (
    "failures_fire_if_thresholds_include_them",
    "every_nth_write_fails_if_configured",
    "writes_overtake_each_other_if_configured",
    "a_requested_order_is_kept",
    "only_a_confirmed_write_is_complete_at_its_end",
    "memory_of_a_device_is_written_if_registered",
)
RULES = (*INFO, *MEMORY, *ENDPOINTS, *COUNTERS, *WORK, *FAILURES, *PROCESSES, *SLOTS, *SETTINGS)


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture(scope="module")
def driver() -> Path:
    return build_driver()


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str, library: Path, driver: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SOFT_CASSINI_", "FI_"))
    }
    environment["TRIGGERKV_LIBFABRIC"] = str(library)
    done = subprocess.run(
        [str(driver), rule],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RULE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_rule_of_the_driver_has_its_test(driver: Path) -> None:
    listed = subprocess.run([str(driver)], capture_output=True, text=True, timeout=RULE_TIMEOUT_S, check=True)
    assert sorted(listed.stdout.split()) == sorted(RULES)
