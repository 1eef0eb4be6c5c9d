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
    "without_hints_there_is_cxi_and_nothing_else",
    "the_entry_says_what_the_real_one_says",
    "extras_are_given_to_who_asks",
    "hints_that_do_not_fit_give_no_data",
    "a_node_is_the_nic_or_an_address_of_this_machine",
    "the_other_exports_are_a_librarys",
)
MEMORY = (
    "there_is_no_key_before_a_region_is_bound_and_enabled",
    "a_region_is_one_range_of_the_hosts_memory",
    "target_addresses_are_offsets_and_end_with_the_region",
    "a_key_is_good_through_its_own_endpoint_alone",
    "a_closed_region_takes_nothing_more",
    "access_is_what_was_asked_for",
    "a_regions_counter_counts_the_writes_into_it",
    "what_arrives_can_fire_work",
)
ENDPOINTS = (
    "an_endpoint_works_once_it_is_bound_and_enabled",
    "what_is_not_there_is_refused_and_not_a_crash",
    "operations_that_make_no_sense_are_refused",
    "entries_come_only_to_who_asks_and_reads",
    "without_selective_completion_every_operation_has_an_entry",
    "the_same_address_has_the_same_number",
    "nothing_closes_while_it_is_used_and_nothing_stays_open",
)
COUNTERS = (
    "counters_add_set_and_refuse_what_they_cannot_hold",
    "counters_are_opened_only_as_cxi_has_them",
    "there_are_2047_counters",
    "waiting_ends_with_the_count_the_first_failure_or_the_time",
    "doorbells_add_and_reset",
    "the_doorbells_length_is_not_the_pages",
    "the_write_back_word_is_written_only_at_its_occasions",
    "work_that_asks_for_it_writes_back_its_trigger",
    "a_cached_counter_answers_with_the_word_before",
    "what_hardware_leaves_undefined_ends_with_a_sentence",
)
WORK = (
    "fires_at_its_threshold_and_not_before",
    "a_doorbell_moves_bytes_without_any_call",
    "one_doorbell_fires_a_whole_chain",
    "a_read_can_be_deferred",
    "counters_can_be_added_to_and_set",
    "insertion_order_is_not_firing_order",
    "what_is_reached_already_fires_at_once",
    "an_entry_comes_if_asked_for_with_the_messages_context",
    "a_completion_counter_is_not_needed",
    "the_peers_address_is_taken_when_the_work_is_queued",
    "a_flush_drops_what_has_not_fired_and_tells_nobody",
    "a_flush_holds_up_every_command_for_a_second",
)
FAILURES = (
    "a_failure_counts_is_told_and_fires_nothing",
    "an_error_hides_what_comes_behind_it_until_it_is_taken",
    "one_bad_key_fails_one_operation",
    "more_failures_than_a_counter_holds_stop_counting",
    "an_inject_that_fails_is_told_with_the_endpoints_context",
    "a_peer_that_is_not_there_is_a_failure",
    "closing_an_endpoint_drops_what_is_under_way",
)
PROCESSES = (
    "one_process_puts_into_another",
    "a_process_that_dies_is_a_failure_of_its_peers",
    "another_process_can_ring",
)
SLOTS = (
    "the_depth_is_told_by_every_version_of_the_extension",
    "beyond_the_depth_there_is_no_space_in_any_domain",
    "other_processes_take_from_the_same_depth",
    "a_write_back_costs_a_second_slot",
    "a_wait_that_timed_out_keeps_its_slot",
    "requests_come_back_only_when_the_queue_is_read",
    "flags_that_deferred_work_cannot_have",
    "work_that_makes_no_sense_is_refused",
    "what_work_still_needs_does_not_close",
)
SETTINGS = (
    "failures_fire_where_they_are_counted",
    "every_so_many_writes_fail_if_asked_to",
    "writes_overtake_each_other_if_asked_to",
    "an_order_that_was_asked_for_is_kept",
    "only_a_confirmed_write_is_whole_at_its_end",
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
