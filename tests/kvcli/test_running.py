"""How both commands end: the right exit status, and never a traceback."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore.cli
import sim.cli
from kvcli.running import Status, run_command
from kvcli.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_start import Warm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
KVSTORE = (sys.executable, "-m", "kvstore")
KVSIM = (sys.executable, "-m", "sim")
BOTH = pytest.mark.parametrize("command", [KVSTORE, KVSIM], ids=["kvstore", "kvsim"])
NAMES: dict[tuple[str, ...], str] = {KVSTORE: "kvstore", KVSIM: "kvsim"}
WAIT_S = 30.0
SERVE = ["serve", "--data", "{}/node", "--listen", "127.0.0.1:0"]
MEMBER = ["--cluster", "127.0.0.1:1/x", "--cluster-replicas", "2"]


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyboardInterrupt(), Status.INTERRUPTED, ""),
        (BrokenPipeError(), Status.DONE, ""),
        (MemoryError(), Status.FAILED, "x: Out of memory.\n"),
        (FileNotFoundError(2, "No such file", "/a/b"), Status.FAILED, "x: /a/b: No such file.\n"),
        (OSError(28, "No space left on device"), Status.FAILED, "x: No space left on device.\n"),
        (ValueError("It is 3."), Status.USAGE, "x: It is 3.\n"),
        (LookupError("It went."), Status.FAILED, "x: It went.\n"),
    ],
)
def test_each_way_to_end_has_its_status_and_one_sentence(
    error: BaseException,
    status: Status,
    says: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcli.running._drop_output", lambda: None)
    known = {ValueError: Status.USAGE, LookupError: Status.FAILED}
    assert run_command("x", raising(error), lambda one: known.get(type(one))) == status
    assert capfd.readouterr().err == says


def test_characters_that_standard_output_lacks_are_escaped() -> None:
    script = (
        "from kvcli.running import run_command; run_command('x', lambda: print('ch\\u00e4t \\u2603') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ch\\xe4t \\u2603\n", "")


def test_a_bug_is_a_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command("x", lambda: 1 // 0)


def test_the_signal_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_command("x", lambda: 0) == Status.DONE
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_cleans_up(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from kvcli.running import run_command\n"
        "def work():\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        "        time.sleep(30)\n"
        "    finally:\n"
        f"        open({str(tmp_path / 'clean')!r}, 'w').close()\n"
        "sys.exit(run_command('x', work))"
    )
    # Whoever runs the tests in the background has these ignored, and children inherit that.
    command = ["env", "--default-signal=INT,HUP", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
        assert process.stderr.read() == b""
    assert (tmp_path / "clean").exists()


def test_an_ignored_sighup_stays_ignored() -> None:
    code = (
        "import signal\n"
        "from kvcli.running import run_command\n"
        "raise SystemExit(run_command('x', lambda: signal.raise_signal(signal.SIGHUP) or 3))"
    )
    assert run("env", "--ignore-signal=HUP", sys.executable, "-c", code).returncode == Status.NO
    assert run("env", "--default-signal=HUP", sys.executable, "-c", code).returncode == Status.HUNG_UP


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(30)\n")
    code = "from kvcli.start import run_main\nrun_main('slow')"
    command = ["env", "--default-signal=INT", f"PYTHONPATH={tmp_path}", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == -signal.SIGINT
        assert process.stderr.read() == b""


def test_an_installed_command_imports_no_package_of_its_own_before_it_handles_ctrl_c() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == set(NAMES.values())
    for entry in scripts.values():
        module, _, name = entry.partition(":")
        code = (
            f"import sys, {module} as one; one.{name}; print(*{{m.partition('.')[0] for m in sys.modules}})"
        )
        packages = set(run(sys.executable, "-c", code).stdout.split())
        assert packages & {"kvcli", "kvstore", "sim", "nic_offload"} == {"kvcli"}


def test_imports_before_ctrl_c_is_handled_take_no_time() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kvstore, kvcli.start; print(*sys.modules)"
    assert "typing" not in run(sys.executable, "-S", "-c", code).stdout.split()


def test_a_command_handles_ctrl_c_once_it_runs() -> None:
    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        return Status.DONE

    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `kvcli.start` leaves it
    try:
        assert run_command("x", interrupted) == Status.INTERRUPTED
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@BOTH
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"]])
def test_a_reader_that_leaves_at_once_is_no_error(command: tuple[str, ...], arguments: list[str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [*command, *arguments],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            env=buffered,
            timeout=WAIT_S,
            check=False,
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


@BOTH
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"]])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_without_room_is_a_failure(
    command: tuple[str, ...], arguments: list[str], unbuffered: str
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            timeout=WAIT_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, f"{NAMES[command]}: No space left on device.\n")


@BOTH
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_traceback(command: tuple[str, ...], closed: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$@" --version {closed}', "-", *command],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    if ">&-" in closed.replace("2>&-", ""):
        said = "" if "2>&-" in closed else f"{NAMES[command]}: Standard output is closed.\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(NAMES[command])


@pytest.mark.parametrize("arguments", [["get", "name:\udcff"], ["serve", "--data", "\udcff/node"]])
def test_an_argument_that_is_not_text_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*KVSTORE, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "kvstore: An argument is not valid UTF-8."


@BOTH
def test_wrong_usage_ends_with_2(command: tuple[str, ...]) -> None:
    assert "required: COMMAND" in run(*command).stderr
    for arguments in ((), ("nonsense",), ("--nonsense",)):
        done = run(*command, *arguments)
        assert done.returncode == Status.USAGE
        assert "Traceback" not in done.stderr
    assert "unrecognized arguments: --nonsense" in done.stderr
    done = run(*command, "completion", "bash", "--nonsense")
    assert done.returncode == Status.USAGE
    assert done.stderr.startswith(f"usage: {'kvstore' if command is KVSTORE else 'kvsim'} completion "), (
        "the usage of its own"
    )


@pytest.mark.parametrize(
    ("main", "arguments"),
    [(kvstore.cli.main, ["stats", "--token", "x"]), (sim.cli.main, ["kv", "--mod", "x"])],
    ids=["kvstore", "kvsim"],
)
def test_half_an_option_is_none(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Or `--token SECRET` would be a `--token-file` that doesn't exist."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == Status.USAGE
    assert f"unrecognized arguments: {arguments[1]} x" in capsys.readouterr().err


@BOTH
def test_the_version_is_the_distributions(command: tuple[str, ...]) -> None:
    assert run(*command, "--version").stdout.split()[1:] == [VERSION]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ["serve", "--data", "{}/node", "--hot", "9999GiB"],
            2,
            "--hot 9.8 TiB exceeds this machine's memory",
        ),
        (["serve", "--data", "/proc/x"], 2, "/proc/x can't be used"),
        (["demo", "--data", "/proc"], 2, "/proc can't be used"),
        (["demo", "--data", "/proc/x"], 2, "/proc/x can't be used"),
        (["demo", "--data", __file__], 2, "it is a file, not a folder"),
        (["bench", "memory", "--data", "/proc"], 2, "/proc can't be used"),
        (["certificates", "/proc", "--node", "a"], 2, "/proc can't be used"),
        (["certificates", "{}/none/certs"], 2, "/none/certs can't be used"),
        (["fsck", "{}/none"], 2, "There is no data folder"),
        (["put", "short", "{}/none"], 2, "64 hexadecimal digits"),
        (["put", "name:a", "{}/none"], 2, "could not be read"),
        (["serve", "--data", "/dev/null"], 2, "it is a file, not a folder"),
        (["serve", "--data", "{}/node", "--capacity", "9999TiB"], 2, "at most 16 TiB, not 9999 TiB"),
        (["serve", "--data", "{}/node", "--listen", "{taken}"], 1, "is in use by another process"),
        ([*SERVE, "--http", "{taken}"], 1, "is in use by another process"),
        ([*SERVE, "--events", "tcp://{taken}"], 1, "Address already in use"),
        ([*SERVE, "--provider", "none"], 2, "There is no provider none in libfabric"),
        ([*SERVE, "--drive", __file__], 2, f"{__file__} can't be used as a drive."),
        ([*SERVE, "--drive", "{}/x:64MiB", "--drive", "{}/x:64MiB"], 2, "--drive names {}/x twice."),
        ([*SERVE, "--tied"], 2, "--tied needs a pipe or a terminal as standard input."),
        ([*SERVE, "--tenants", "{}/none"], 2, "{}/none could not be read"),
        ([*SERVE, "--tls-cert", "{}/none", "--tls-key", "{}/none"], 2, "{}/none could not be read"),
        ([*SERVE, "--master-key", "file:{}/none"], 2, "{}/none could not be read"),
        ([*SERVE, "--audit", "{}/none/log"], 2, "{}/none/log can't be written"),
        ([*SERVE, "--cluster", "127.0.0.1:1/x", "--cluster-ca", "{}/none"], 2, "{}/none could not be read"),
        ([*SERVE, *MEMBER, "--cluster-secret", "{}/none"], 2, "{}/none could not be read"),
        ([*SERVE, *MEMBER, "--cluster-nodes-ca", "{}/none"], 2, "{}/none could not be read"),
        (["watch", "--seconds", "0"], 2, "--seconds"),
        (["pin", "name:a", "--seconds", "601"], 2, "1 to 600"),
    ],
)
def test_an_impossible_value_is_one_sentence(
    arguments: list[str], status: int, says: str, tmp_path: Path, warm: Warm
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def put_in(text: str) -> str:
            port = taken.getsockname()[1]
            return text.replace("{}", str(tmp_path)).replace("{taken}", f"127.0.0.1:{port}")

        done, says = warm.run([*KVSTORE, *map(put_in, arguments)], WAIT_S), put_in(says)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("kvstore: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "node").exists(), "nothing is made for what can't be served"


def test_grpc_logs_nothing_besides_the_sentence(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    done = run(*KVSTORE, "stats", "--node", "127.0.0.1:1", "--ca", str(ca))
    assert (done.returncode, done.stdout) == (Status.FAILED, "")
    assert done.stderr.startswith("kvstore: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_demo_ended_by_a_signal_leaves_no_process_and_no_message(
    number: signal.Signals, tmp_path: Path
) -> None:
    data = tmp_path / "demo"
    data.mkdir()
    with subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *KVSTORE, "demo", "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        node = next(
            int(found[1]) for line in process.stdout if (found := re.search(r"process (\d+) on", line))
        )
        # Another process writes tokens, and would print what it has written.
        next(line for line in process.stdout if re.search(r"fired +[1-9]", line))
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
        assert process.stderr.read() == ""
    until = time.monotonic() + WAIT_S
    while Path(f"/proc/{node}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("pause_s", [0.0, 0.003])
def test_a_node_that_gets_several_signals_ends_cleanly(pause_s: float, tmp_path: Path) -> None:
    command = [
        "env",
        "--default-signal=INT,TERM,HUP",
        *KVSTORE,
        *SERVE,
        "--capacity",
        "64MiB",
        "--hot",
        "128MiB",
    ]
    with subprocess.Popen(
        [part.replace("{}", str(tmp_path)) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("ready ")
        until = time.monotonic() + WAIT_S
        for number in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
            process.send_signal(number)
            if process.poll() is not None:
                break
            if time.monotonic() > until:
                process.kill()
            time.sleep(pause_s)
        assert process.returncode == Status.DONE
        assert "Traceback" not in process.stderr.read()


def test_a_signal_between_the_end_of_the_loop_and_of_the_command_does_nothing() -> None:
    code = (
        "import asyncio, signal\n"
        "from kvstore.node.server import _at_signals\n"
        "async def serve():\n"
        "    _at_signals(lambda: None, signal.SIGTERM)\n"
        "asyncio.run(serve())\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('alive')"
    )
    assert run(sys.executable, "-c", code).stdout == "alive\n"


def test_a_signal_after_the_end_does_not_change_the_status() -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from kvcli.running import run_command\n"
        "threading.Thread(target=threading.Event().wait, args=(10,), daemon=True).start()\n"
        "status = run_command('x', lambda: 3, ends_process=True)\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    os.kill(os.getpid(), number)\n"  # the other thread gets it
        "    while number in signal.sigpending():\n"
        "        pass\n"
        "    signal.signal(number, signal.SIG_DFL)\n"  # as libfabric's libraries do at their end
        "    signal.raise_signal(number)\n"
        "sys.exit(status)"
    )
    assert run(sys.executable, "-c", code).returncode == Status.NO


def test_the_page_has_each_status_and_each_command() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE, re.MULTILINE))
    assert {int(number) for number in rows} == set(map(int, Status))
    for parser in (kvstore.cli._parser(), sim.cli._parser()):
        (commands,) = [one.choices for one in parser._actions if isinstance(one.choices, dict)]
        for name in commands:
            assert f"`{name}`" in PAGE, name
