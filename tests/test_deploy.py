"""The files in deploy/: their commands and metrics exist, and real programs accept and use them."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import typer
import yaml

from benching import pool_on_disk
from dicoms import dicom
from live_service import LiveService
from mergestream.cli import app as cli
from mergestream.client import Client, ServiceProblem
from mergestream.serving.audit.keys import create_key
from mergestream.serving.dicom_network.rules import read_rules
from mergestream.serving.http.tokens import create_token
from mergestream.serving.reports.destinations import read_destinations
from services import LocalService, png

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "mergestream.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NOBODY = 10001
NO_CAPABILITIES = ("--bounding-set=-all", "--inh-caps=-all")


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def alert_queries() -> list[str]:
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:mergestream|process)_[a-z_]+", query))


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: scripts/install_service_tools.sh installs it on Debian")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


pool = pool_on_disk


@pytest.fixture(scope="module")
def secured(
    pool: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalService, str]]:  # and an administrator's token
    folder = tmp_path_factory.mktemp("secured")
    token = create_token(folder / "tokens", "administrator", "monitor")
    unreachable = f"destinations: [{{name: pacs, kind: c-store, host: 127.0.0.1, port: {free_port()}, ae_title: PACS}}]"
    (folder / "destinations.yaml").write_text(unreachable)
    more = {"dicom_port": 0, "destinations": folder / "destinations.yaml"}
    with LocalService(pool, folder / "state", tokens=folder / "tokens", rate=0, **more) as service:
        with Client(service.url, token) as client:
            client.answer([bytes(png(0)), bytes(png(1))], "ward")
        yield service, token


def unit_command() -> list[str]:
    text = (DEPLOY / "mergestream.service").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    return line.split()[1:]


def image_command() -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return json.loads(re.findall(r"^CMD (\[.*\])$", text, flags=re.MULTILINE)[-1])


@pytest.mark.parametrize(
    "command",
    [unit_command(), image_command(), COMPOSE["services"]["mergestream"]["command"]],
    ids=["unit", "image", "compose"],
)
def test_commands_are_of_this_version(command: list[str]) -> None:
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    assert command[0] == "serve"
    assert serve.make_context("serve", command[1:]).params["host"] in ("127.0.0.1", "0.0.0.0")


def test_every_metric_of_dashboard_and_alerts_exists(secured: tuple[LocalService, str]) -> None:
    service, token = secured
    with service.client(headers={"Authorization": f"Bearer {token}"}) as http:
        text = http.get("/metrics").text
    exposed = set(re.findall(r"^(?:# TYPE )?([a-z_]+)", text, flags=re.MULTILINE))
    for query in (*dashboard_queries(), *alert_queries()):
        assert metrics_in(query) <= exposed, query


def test_panels_do_not_overlap_and_alerts_say_what_to_do() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(places) == len(set(places))
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert set(rule["annotations"]) == {"summary", "next"}, rule["alert"]


def test_the_container_has_no_rights_and_its_files_exist() -> None:
    service = COMPOSE["services"]["mergestream"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "USER 10001:10001" in (DEPLOY / "Dockerfile").read_text()
    for each in COMPOSE["services"].values():
        for mount in each["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("./") and not source.startswith("./site/"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("./"):
                assert source in COMPOSE["volumes"]
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line


def user_without_rights() -> int:
    """The container's user; root, also without capabilities, if another user cannot start this Python."""
    if os.getuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("mounting needs root")
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import mergestream'], check=True)"
    command = [*without_rights(NOBODY), sys.executable, "-c", script]
    return NOBODY if subprocess.run(command, capture_output=True, check=False).returncode == 0 else 0


def without_rights(user: int) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", *NO_CAPABILITIES]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
def test_it_runs_without_home_on_a_read_only_file_system(
    pool: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the container: a user without home or rights, and one folder that can be written."""
    user = user_without_rights()
    monkeypatch.delenv("HF_HOME", raising=False)
    shutil.copytree(pool, open_folder / "pool")
    state = open_folder / "state"
    for each in (state, state / "tmp"):
        each.mkdir()
        os.chown(each, user, user)
    script = f'mount --bind "{state}" "{state}" && mount --bind -o remount,ro / / && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, "sh", *without_rights(user)]
    variables = {"HOME": "/nonexistent", "TMPDIR": str(state / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    service = LiveService(open_folder, open_folder / "pool", prefix=prefix, **variables)
    subprocess.run(["chmod", "-R", "a-r", *map(str, (open_folder / "pool").rglob("weights.safetensors"))], check=True)
    with pytest.raises(AssertionError, match=r"weights\.safetensors cannot be read: Permission denied"):
        service.start()
    subprocess.run(["chmod", "-R", "a+rX", str(open_folder / "pool")], check=True)
    with service:
        with Client(service.url) as client:
            assert client.answer([png(0), png(1)], "ward").audit_sequence is not None
        status = Path(f"/proc/{service.pid}/status").read_text()
        assert re.search(rf"^Uid:\s+{user}", status, flags=re.MULTILINE)
        assert service.stop() == 0
    assert service.log.stat().st_uid == user


def test_the_sample_rules_are_valid() -> None:
    rules = read_rules(DEPLOY / "rules.yaml")
    assert rules.callers == {"ORTHANC"}
    assert [rule.stream for rule in rules.rules] == ["mammography", "chest", "slices"]
    (destination,) = read_destinations(DEPLOY / "destinations.yaml").destinations
    assert (destination.name, destination.ae_title, destination.objects) == ("orthanc", "ORTHANC", ("sr",))


@pytest.mark.slow
def test_systemd_accepts_the_unit() -> None:
    analyze = need("systemd-analyze")
    unit = str(DEPLOY / "mergestream.service")
    verified = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    problems = [line for line in verified.stderr.splitlines() if "is not executable" not in line]  # not installed here
    assert problems == []
    rated = [analyze, "security", "--offline=true", "--threshold=20", unit]  # of 100; without hardening it is 96
    done = subprocess.run(rated, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot rate a unit offline")
    assert done.returncode == 0, done.stdout


@contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def wait_until(check, seconds: float = 30.0):
    ends = time.monotonic() + seconds
    while True:
        try:
            result = check()
        except (httpx.TransportError, OSError):
            result = None
        if result:
            return result
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.2)


@pytest.mark.slow
def test_caddy_gives_tls_in_front_of_the_service(secured: tuple[LocalService, str], tmp_path: Path) -> None:
    caddy = need("caddy")
    service, token = secured
    port, file = free_port(), str(DEPLOY / "Caddyfile")
    environment = {
        "MERGESTREAM_SITE": f"localhost:{port}",
        "MERGESTREAM_UPSTREAM": service.url.removeprefix("http://"),
        "XDG_DATA_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "HOME": str(tmp_path),
    }
    checked = [caddy, "validate", "--config", file, "--adapter", "caddyfile"]
    subprocess.run(checked, check=True, capture_output=True, env={**os.environ, **environment})
    with running(caddy, "run", "--config", file, "--adapter", "caddyfile", **environment):
        authority = tmp_path / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        wait_until(authority.exists)
        url = f"https://localhost:{port}"
        wait_until(lambda: httpx.get(f"{url}/healthz", verify=ssl.create_default_context(cafile=authority)))
        with Client(url, token, ca_file=authority) as client:
            answer = client.answer([png(0)], "behind-caddy")
            assert answer.audit_hash in {line["hash"] for line in service.lines("step")}
            with pytest.raises(ServiceProblem, match="http_404"):
                client._get("/metrics")
            page = client._http.get("/")
            assert (page.status_code, "server" in page.headers) == (200, False)
            assert page.headers["strict-transport-security"]


@pytest.mark.slow
def test_prometheus_scrapes_the_service_and_evaluates_every_query(
    secured: tuple[LocalService, str], tmp_path: Path
) -> None:
    prometheus, promtool = need("prometheus"), need("promtool")
    service, token = secured
    (tmp_path / "token").write_text(token)
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("mergestream:8000", service.url.removeprefix("http://")).replace("15s", "1s")
    text = text.replace("/etc/mergestream/prometheus.token", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    subprocess.run([promtool, "check", "config", str(tmp_path / "prometheus.yml")], check=True, capture_output=True)
    address = f"127.0.0.1:{free_port()}"
    command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with running(*command, f"--web.listen-address={address}"), httpx.Client(base_url=f"http://{address}") as http:

        def values(query: str) -> list[dict]:
            reply = http.get("/api/v1/query", params={"query": query}).json()
            assert reply["status"] == "success", (query, reply)
            return reply["data"]["result"]

        wait_until(lambda: http.get("/-/ready").status_code == 200)  # before that it answers no queries
        wait_until(lambda: [each for each in values('up{job="mergestream"}') if each["value"][1] == "1"])
        wait_until(lambda: values("rate(mergestream_images_total[5s])"))
        empty = {query for query in dashboard_queries() if not values(query.replace("$__rate_interval", "5s"))}
        assert all(re.search("findings|quantile|estimated|deriv", query) for query in empty), empty  # no traffic now
        wait_until(lambda: http.get("/api/v1/rules").json()["data"]["groups"])
        (group,) = http.get("/api/v1/rules").json()["data"]["groups"]
        assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in ALERTS["groups"][0]["rules"]]


def command_path(tmp_path: Path) -> str:
    """A PATH where `mergestream` is this checkout."""
    script = tmp_path / "bin" / "mergestream"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mergestream "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def orthanc_files(folder: Path, dicom_port: int) -> tuple[str, int, int]:
    """The files of deploy/orthanc with this machine's paths and free ports: configuration, HTTP port, DICOM port."""
    lines = (DEPLOY / "orthanc" / "orthanc.json").read_text().splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.strip().startswith("//")))
    shutil.copy(DEPLOY / "orthanc" / "forward.lua", folder)
    settings |= {name: str(folder / "db") for name in ("StorageDirectory", "IndexDirectory")}
    settings |= {"HttpPort": free_port(), "DicomPort": free_port(), "LuaScripts": [str(folder / "forward.lua")]}
    settings["DicomModalities"]["mergestream"] |= {"Host": "127.0.0.1", "Port": dicom_port}
    (folder / "orthanc.json").write_text(json.dumps(settings))
    return str(folder / "orthanc.json"), settings["HttpPort"], settings["DicomPort"]


def reports(http: httpx.Client) -> list[str]:
    """Orthanc's structured reports."""
    asked = {"Level": "Instance", "Query": {"Modality": "SR"}}
    return http.post("/tools/find", json=asked).json()


@pytest.mark.slow
def test_orthanc_forwards_images_tries_again_after_the_service_was_away_and_gets_reports(
    pool: Path, tmp_path: Path
) -> None:
    orthanc, storescu = need("Orthanc"), need("storescu")
    node = free_port()
    configuration, http_port, dicom_port = orthanc_files(tmp_path, node)
    destinations = (DEPLOY / "destinations.yaml").read_text()
    destinations = destinations.replace("host: orthanc", "host: 127.0.0.1").replace("4242", str(dicom_port))
    (tmp_path / "destinations.yaml").write_text(destinations)
    rules = ("--dicom-port", str(node), "--dicom-rules", str(DEPLOY / "rules.yaml"))
    rules += ("--destinations", str(tmp_path / "destinations.yaml"))
    login = {"auth": ("viewer", "secret"), "base_url": f"http://127.0.0.1:{http_port}"}

    def send(number: int) -> None:
        file = tmp_path / f"{number}.dcm"
        uid = f"1.2.826.0.1.3680043.8.498.9.{number}"
        file.write_bytes(dicom(np.full((16, 16), number, np.uint8), Modality="MG", SOPInstanceUID=uid))
        command = [storescu, "-aec", "ORTHANC", "127.0.0.1", str(dicom_port), str(file)]
        subprocess.run(command, check=True, capture_output=True)

    with running(orthanc, configuration, ORTHANC_PASSWORD="secret"), httpx.Client(**login) as http:
        wait_until(lambda: http.get("/system").status_code == 200)
        assert httpx.get(f"{login['base_url']}/system").status_code == 401
        send(1)  # the service is not there yet
        wait_until(lambda: [job for job in http.get("/jobs?expand").json() if job["State"] == "Failure"])
        with LiveService(tmp_path, pool, *rules) as service, Client(service.url) as client:
            send(2)
            wait_until(lambda: [each for each in client.streams() if each.name == "mammography" and each.images == 2])
            wait_until(lambda: len(reports(http)) == 2)
            time.sleep(3)  # a report that were forwarded would come back as another image
            assert (len(reports(http)), client.stream("mammography").images) == (2, 2)


@pytest.mark.slow
def test_a_backup_under_traffic_is_restored_and_continued(pool: Path, tmp_path: Path) -> None:
    private, public = create_key(tmp_path / "site.key")
    options = ("--audit-key", str(private), "--option", "momentum=0.9", "--dicom-port", "0")
    options += ("--destinations", str(DEPLOY / "destinations.yaml"))
    environment = {**os.environ, "PATH": command_path(tmp_path)}
    backup = [str(DEPLOY / "backup.sh"), str(tmp_path / "state"), str(tmp_path / "backups"), str(public)]
    with LiveService(tmp_path, pool, *options) as service:
        with Client(service.url) as client:
            for number in range(4):
                client.answer([png(number), png(number + 1)], "ward")
            process = subprocess.Popen(backup, stdout=subprocess.PIPE, text=True, env=environment)
            number = 4
            while process.poll() is None:
                client.answer([png(number), png(number + 1)], "ward")
                number += 1
            assert process.returncode == 0
        assert service.stop() == 0
    (copy,) = [Path(line) for line in process.communicate()[0].splitlines()[-1:]]
    lines = (copy / "audit.jsonl").read_text().splitlines()
    steps = sum(json.loads(line)["kind"] == "step" for line in lines)
    assert 4 <= steps <= number
    assert (copy / "dicom" / "outbox" / "outbox.sqlite").stat().st_size > 0
    shutil.move(tmp_path / "state", tmp_path / "lost")
    shutil.copytree(copy, tmp_path / "state")
    with LiveService(tmp_path, pool, *options) as service:
        with Client(service.url) as client:
            assert client.stream("ward").steps == steps
            assert client.answer([png(0)], "ward").step == steps
        assert service.stop() == 0
    anchor = copy.with_name(f"{copy.name}.anchor.json")
    verify = [sys.executable, "-m", "mergestream", "audit", "verify", str(tmp_path / "state" / "audit.jsonl")]
    done = subprocess.run([*verify, "--key", str(public), "--anchor", str(anchor)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    damaged = tmp_path / "lost" / "audit.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b'"stream":"ward"', b'"stream":"bard"', 1))
    backup[1] = str(tmp_path / "lost")
    assert subprocess.run(backup, capture_output=True, env=environment, check=False).returncode == 1
    assert not list((tmp_path / "backups").glob("*.part"))
