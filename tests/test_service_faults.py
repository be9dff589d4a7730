"""The running service and what happens to hospitals' machines: power cuts, full disks, damaged pools."""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benching import command, pool_on_disk
from live_service import LiveService, Senders
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.audit.lines import raw_lines
from mergestream.serving.audit.log_verification import VerificationReport, verify
from mergestream.serving.startup import ServeOptions, serve
from test_intake import drawn, saved

pytestmark = pytest.mark.slow
PICTURES = [saved(np.asarray(drawn((24, 24, 3), seed)), "PNG") for seed in range(16)]


pool = pool_on_disk


def logged_steps(log: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(raw.text) for raw in raw_lines(log) if not raw.torn]
    return {line["sequence"]: line for line in lines if line["kind"] == "step"}


def require_logged(answers: list[dict[str, Any]], steps: dict[int, dict[str, Any]]) -> None:
    """Every answer is in the log as it was told: number, hash, stream, step and predictions."""
    assert answers
    for answer in answers:
        line = steps[answer["audit"]["sequence"]]
        body = line["body"]
        assert (line["hash"], body["stream"], body["step"]) == (
            answer["audit"]["hash"], answer["stream"], answer["step"],
        )  # fmt: skip
        names = [answer["classes"][number] for number in body["predictions"]]
        names = [None if place in body["abstained"] else name for place, name in enumerate(names)]
        first = answer["position"]
        assert answer["predictions"] == (names if first is None else names[first : first + 1])


def sound(log: Path) -> VerificationReport:
    report = verify(log)
    assert report.sound, report.problems
    return report


# --- killed -------------------------------------------------------------------------------------------------


def test_killed_ten_times_under_load_no_answer_is_lost_or_doubled(pool: Path, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    for round_ in range(10):
        with LiveService(tmp_path, pool) as service:
            steps = {stream["name"]: stream["steps"] for stream in streams(service)}
            assert steps == Counter(line["body"]["stream"] for line in logged_steps(service.log).values())
            senders = Senders(service, PICTURES).start()
            senders.wait_for(10 + 3 * round_)
            service.kill()
            senders.stop()
        assert not senders.problems
        answers += senders.answers
        sound(service.log)
        require_logged(answers, logged_steps(service.log))
    with LiveService(tmp_path, pool) as service:
        assert service.stop() == 0
    assert sound(service.log).torn is None
    numbers = Counter((line["body"]["stream"], line["body"]["step"]) for line in logged_steps(service.log).values())
    assert set(numbers.values()) == {1}  # no step was taken twice


def test_a_torn_last_line_is_named_and_put_aside(pool: Path, tmp_path: Path) -> None:
    with LiveService(tmp_path, pool) as service:
        senders = Senders(service, PICTURES, threads=2).start()
        senders.wait_for(6)
        service.kill()
        senders.stop()
    with service.log.open("ab") as log:
        log.write(b'{"body":{"stream":"site-0","ste')
    done = command("audit", "verify", str(service.log))
    assert "torn" in done.stdout
    assert done.returncode == 0
    with LiveService(tmp_path, pool) as service:
        assert service.stop() == 0
    assert sound(service.log).torn is None
    require_logged(senders.answers, logged_steps(service.log))
    assert len(list(service.state.glob("*.torn"))) == 1


def streams(service: LiveService) -> list[dict[str, Any]]:
    with service.client() as client:
        return client.get("/v1/streams").json()["streams"]


# --- no room ------------------------------------------------------------------------------------------------


def wait_for_refusals(senders: Senders, count: int) -> None:
    ends = time.monotonic() + 60
    while len(senders.problems) < count:
        assert time.monotonic() < ends, "no request was refused"
        time.sleep(0.01)


def require_refusals(senders: Senders, service: LiveService) -> None:
    """While nothing can be logged nothing is answered, and it says so; it stays alive."""
    before = len(senders.answers)
    wait_for_refusals(senders, len(senders.problems) + 30)
    with service.client() as client:
        assert client.get("/healthz").status_code == 200
    assert len(senders.answers) == before


def require_not_ready(service: LiveService) -> None:
    with service.client() as client:
        answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["code"] == "audit_unavailable"


def require_back(senders: Senders, service: LiveService) -> None:
    senders.wait_for(len(senders.answers) + 30)
    senders.stop()
    with service.client() as client:
        assert client.get("/readyz").status_code == 200


def require_all_told(senders: Senders) -> None:
    for problem in senders.problems:
        assert problem.status_code == 503
        assert problem.headers["content-type"] == "application/problem+json"
        assert problem.json()["code"] == "audit_unavailable"
        assert int(problem.headers["retry-after"]) > 0
        assert "/" not in problem.json()["detail"]  # no path of this machine


def test_a_full_disk_is_503_and_neither_an_answer_nor_a_line_is_lost(pool: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE, put on the running process from outside, and lifted."""
    with LiveService(tmp_path, pool) as service:
        senders = Senders(service, PICTURES).start()
        senders.wait_for(30)
        _, most = resource.prlimit(service.engine, resource.RLIMIT_FSIZE)
        resource.prlimit(service.engine, resource.RLIMIT_FSIZE, (service.log.stat().st_size + 20_000, most))
        wait_for_refusals(senders, 1)
        # A step of fewer pictures might still fit.
        resource.prlimit(service.engine, resource.RLIMIT_FSIZE, (service.log.stat().st_size, most))
        wait_for_refusals(senders, len(senders.problems) + 8)
        require_refusals(senders, service)
        require_not_ready(service)
        resource.prlimit(service.engine, resource.RLIMIT_FSIZE, (most, most))
        require_back(senders, service)
        assert service.stop() == 0
    require_all_told(senders)
    steps = logged_steps(service.log)
    require_logged(senders.answers, steps)
    assert {answer["audit"]["sequence"] for answer in senders.answers} == set(steps)  # and nothing unanswered is there
    assert "could not be written for a while" in " ".join(sound(service.log).notes)


def test_room_for_a_check_and_for_no_step_is_not_ready(pool: Path, tmp_path: Path) -> None:
    """A check's line is shorter than a step's."""
    with LiveService(tmp_path, pool) as service, service.client() as client:
        _, most = resource.prlimit(service.engine, resource.RLIMIT_FSIZE)
        resource.prlimit(service.engine, resource.RLIMIT_FSIZE, (service.log.stat().st_size + 2000, most))
        answer = client.post("/v1/streams/a/batches", files={"images": PICTURES[0]})
        assert answer.status_code == 503
        require_not_ready(service)


def test_a_file_system_of_two_megabytes(pool: Path, tmp_path: Path) -> None:
    """A real one, mounted in a name space of its own; files in it are reached through the process."""
    state = tmp_path / "state"
    state.mkdir()
    mount = f'mount -t tmpfs -o size=2m tmpfs "{state}" && exec "$@"'
    prefix = ["unshare", "--mount", "--map-root-user", "--user", "sh", "-c", mount, "sh"]
    probe = [*prefix, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    with LiveService(tmp_path, pool, prefix=prefix) as service:
        disk = Path(f"/proc/{service.pid}/root") / state.relative_to("/")
        log, ballast = disk / "audit.jsonl", disk / "ballast"
        senders = Senders(service, PICTURES).start()
        senders.wait_for(30)
        free = shutil.disk_usage(disk).free
        ballast.write_bytes(bytes(max(0, free - 60_000)))
        wait_for_refusals(senders, 40)
        require_refusals(senders, service)
        require_not_ready(service)
        ballast.unlink()
        require_back(senders, service)
        steps = logged_steps(log)
        require_logged(senders.answers, steps)
        assert {answer["audit"]["sequence"] for answer in senders.answers} == set(steps)
        sound(log)
        assert service.stop() == 0
    require_all_told(senders)


def test_a_disk_that_is_full_already_is_an_error_before_anything_is_answered(pool: Path, tmp_path: Path) -> None:
    with LiveService(tmp_path, pool) as service:
        assert service.stop() == 0
    size = service.log.stat().st_size + 100

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    line = [sys.executable, "-m", "mergestream", "serve", str(pool), "--port", "0", "--state", str(service.state)]
    done = subprocess.run(line, capture_output=True, text=True, preexec_fn=limited, timeout=120, check=False)
    assert done.returncode == 1
    assert "audit.jsonl cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert sound(service.log).torn is None


# --- damaged pools ------------------------------------------------------------------------------------------


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink], ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["weights.safetensors", "expert.json"])
def test_a_damaged_pool_is_refused_by_the_file_s_name(pool: Path, tmp_path: Path, damage: Any, name: str) -> None:
    broken = tmp_path / "pool"
    shutil.copytree(pool, broken)
    damage(broken / "lyon" / name)
    printed: list[str] = []
    with pytest.raises(MergestreamError, match="lyon") as refusal:
        serve(ServeOptions(broken, port=0, state=tmp_path / "state"), printed.append)
    assert name in str(refusal.value)
    assert not any(line.startswith("Ready") for line in printed)
