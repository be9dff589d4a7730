"""Roles of every route, owners of streams, proxies and odd texts; without sockets."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route

from engines import PLAIN, around, small_pool
from mergestream.runtime.errors import InputError
from mergestream.serving.audit.log_writer import NoAuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.http.application import create_app
from mergestream.serving.http.tokens import ADMINISTRATOR, CLIENT, Tokens, create_token
from mergestream.serving.service import Service
from mergestream.serving.startup import ServeOptions, serve
from services import STREAMS, form, png
from test_service_security import inside, opened, require_problem

FREE = {"/", "/docs", "/docs.css", "/openapi.json", "/healthz", "/readyz"}
CLIENTS = {
    ("POST", "/v1/streams/{stream}/batches"), ("POST", "/v1/streams/{stream}/images"), ("GET", "/v1/streams"),
    ("GET", "/v1/streams/{stream}"), ("GET", "/v1/streams/{stream}/recent"), ("GET", "/v1/pool"),
    ("GET", "/v1/overview"), ("GET", "/metrics"), ("POST", "/dicomweb/studies"),
    ("GET", "/v1/streams/{stream}/quality"), ("GET", "/v1/outbox"),
}  # fmt: skip
DASHBOARD = (".js", ".css", ".svg", ".html", ".png", ".woff2")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    pool = small_pool()
    more = {"state_folder": tmp_path / "in", "guards": PLAIN, **around(pool, tmp_path)}
    made = Engine(pool, "entropy_adaptive", {}, audit=NoAuditLog(), **more)
    yield made
    made.close()


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "tokens"
    roles = {"scanner": CLIENT, "camera": CLIENT, "boss": ADMINISTRATOR}
    return {name: create_token(file, role, name) for name, role in roles.items()}


def service_of(engine: Engine, folder: Path, **more: Any) -> Service:
    return Service(opened(engine), tokens=Tokens(folder / "tokens"), **more)


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", f"{STREAMS}/images"), ("DELETE", f"{STREAMS}/batches"), ("PUT", "/v1/pool/experts/images")],
)
def test_no_name_makes_a_client_an_administrator(
    engine: Engine, tmp_path: Path, tokens: dict[str, str], method: str, path: str
) -> None:
    """Roles were once recognised by how a path ends."""

    async def talk(client: httpx.AsyncClient) -> None:
        for name in ("images", "batches"):
            sent = await client.post(f"{STREAMS}/{name}/batches", files=form(png(1)), headers=bearer(tokens["scanner"]))
            assert sent.status_code == 200
        body = {"json": {"on": False}} if method == "PUT" else {}
        refused = await client.request(method, path, headers=bearer(tokens["scanner"]), **body)
        require_problem(refused, "forbidden")

    inside(service_of(engine, tmp_path), talk)


def test_every_route_has_its_role(engine: Engine, tmp_path: Path, tokens: dict[str, str]) -> None:
    service = service_of(engine, tmp_path)
    routes = [(method, route.path) for route in create_app(service).routes for method in route.methods]  # type: ignore[attr-defined]
    assert len(routes) > 30
    assert set(routes) >= CLIENTS

    async def talk(client: httpx.AsyncClient) -> None:
        for method, path in routes:
            url = path.replace("{stream}", "ward").replace("{expert}", "nobody")
            codes = {}
            for name, token in {"none": None, "wrong": "wrong", **tokens}.items():
                answer = await client.request(method, url, headers=bearer(token))
                assert answer.status_code < 500
                codes[name] = answer.json()["code"] if answer.status_code >= 400 else "ok"
            if path in FREE or path.endswith(DASHBOARD):
                assert set(codes.values()) == {"ok"}, path
                continue
            assert codes["none"] == codes["wrong"] == "unauthorized", path
            assert (codes["scanner"] == "forbidden") == ((method, path) not in CLIENTS), (method, path, codes)
            assert codes["boss"] != "forbidden"

    inside(service, talk)


def test_a_route_without_a_role_is_for_administrators(engine: Engine, tmp_path: Path, tokens: dict[str, str]) -> None:
    service = service_of(engine, tmp_path)

    async def talk(client: httpx.AsyncClient) -> None:
        app = client._transport.app  # type: ignore[attr-defined]
        app.add_api_route("/new", lambda: {"new": True})
        app.router.routes.append(Route("/plain", lambda _: Response()))
        for path in ("/new", "/plain"):
            require_problem(await client.get(path), "unauthorized")
            require_problem(await client.get(path, headers=bearer(tokens["scanner"])), "forbidden")
            assert (await client.get(path, headers=bearer(tokens["boss"]))).status_code == 200

    inside(service, talk)


# --- owners -----------------------------------------------------------------------------------------------------------


def sender(client: httpx.AsyncClient, tokens: dict[str, str]) -> Callable[..., Any]:
    async def send(name: str, stream: str, to: str = "batches", file: bytes | None = None) -> httpx.Response:
        files = form(png(1) if file is None else file)
        return await client.post(f"{STREAMS}/{stream}/{to}", files=files, headers=bearer(tokens[name]))

    return send


def test_a_stream_belongs_to_the_token_that_made_it(engine: Engine, tmp_path: Path, tokens: dict[str, str]) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        assert (await send("scanner", "ward")).status_code == 200
        for to in ("batches", "images"):
            require_problem(await send("camera", "ward", to), "forbidden")
        for path in (f"{STREAMS}/ward", f"{STREAMS}/ward/recent"):
            require_problem(await client.get(path, headers=bearer(tokens["camera"])), "forbidden")
            assert (await client.get(path, headers=bearer(tokens["scanner"]))).status_code == 200
            assert (await client.get(path, headers=bearer(tokens["boss"]))).status_code == 200
        for path in (STREAMS, "/v1/overview"):
            shown = {name: await client.get(path, headers=bearer(tokens[name])) for name in tokens}
            counts = {name: len(answer.json()["streams"]) for name, answer in shown.items()}
            assert counts == {"scanner": 1, "camera": 0, "boss": 1}
        numbers = {name: (await client.get("/metrics", headers=bearer(tokens[name]))).text for name in tokens}
        counted = {name: "mergestream_findings_total{" in text for name, text in numbers.items()}
        assert counted == {"scanner": True, "camera": False, "boss": True}
        assert (await send("boss", "ward")).status_code == 200  # and the stream stays the scanner's
        assert (await send("scanner", "ward", "images")).status_code == 200
        assert engine.streams()[0]["steps"] == 3
        assert (await client.delete(f"{STREAMS}/ward", headers=bearer(tokens["boss"]))).status_code == 204
        assert (await send("camera", "ward")).status_code == 200

    inside(service_of(engine, tmp_path), talk)


def test_the_stream_of_the_watched_folder_is_for_administrators(
    engine: Engine, tmp_path: Path, tokens: dict[str, str]
) -> None:
    from mergestream.serving.watched_folder import Watcher, answer_images

    service = service_of(engine, tmp_path)
    service.folder = Watcher(tmp_path / "watched", partial(answer_images, service, False))

    async def talk(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        require_problem(await send("scanner", "watched-folder"), "forbidden")
        assert (await send("boss", "watched-folder")).status_code == 200

    inside(service, talk)


def test_one_token_cannot_take_all_streams(engine: Engine, tmp_path: Path, tokens: dict[str, str]) -> None:
    from mergestream.serving.stream_owners import StreamOwners

    async def talk(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        for stream in ("one", "two"):
            assert (await send("scanner", stream)).status_code == 200
        require_problem(await send("scanner", "three"), "too_many_streams")
        require_problem(await send("camera", "three", file=png(1)[:50]), "damaged")
        assert (await send("camera", "three")).status_code == 200
        for stream in ("four", "five", "six"):
            assert (await send("boss", stream)).status_code == 200
        assert (await send("scanner", "two")).status_code == 200

    inside(service_of(engine, tmp_path, owners=StreamOwners(quota=2)), talk)


def test_a_first_batch_that_fails_takes_no_stream(
    engine: Engine, tmp_path: Path, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InputError("no")

    async def talk(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "answer", fail)
            require_problem(await send("scanner", "ward"), "unusable_picture")
        assert (await send("camera", "ward")).status_code == 200

    inside(service_of(engine, tmp_path), talk)


def test_owners_outlive_a_restart_and_old_streams_go_to_the_first_sender(
    engine: Engine, tmp_path: Path, tokens: dict[str, str]
) -> None:
    from mergestream.serving.stream_owners import StreamOwners

    file = tmp_path / "owners.json"

    async def before(client: httpx.AsyncClient) -> None:
        assert (await sender(client, tokens)("scanner", "ward")).status_code == 200

    async def after(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        require_problem(await send("camera", "ward"), "forbidden")
        file.unlink()

    async def without_owners(client: httpx.AsyncClient) -> None:
        send = sender(client, tokens)
        assert (await client.get(f"{STREAMS}/ward", headers=bearer(tokens["scanner"]))).status_code == 200
        assert (await send("boss", "ward")).status_code == 200
        assert (await send("camera", "ward")).status_code == 200
        require_problem(await send("scanner", "ward"), "forbidden")

    for talk in (before, after, without_owners):
        service = service_of(engine, tmp_path, owners=StreamOwners(file))
        service._close = lambda _: None  # type: ignore[method-assign]  # the engine goes on
        inside(service, talk)
    assert json.loads(file.read_text())["owners"] == {"ward": "camera"}


# --- without tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP"]
)
def test_without_tokens_a_proxy_gets_nothing(engine: Engine, header: str) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.get(STREAMS)).status_code == 200
        refused = await client.get(STREAMS, headers={header: "for=192.0.2.1"})
        require_problem(refused, "tokens_needed")
        assert "--tokens" in refused.json()["detail"]

    inside(Service(opened(engine)), talk)


def test_without_tokens_other_machines_get_nothing(engine: Engine) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        client._transport.client = ("192.0.2.1", 1234)  # type: ignore[attr-defined]
        require_problem(await client.get(STREAMS), "tokens_needed")
        client._transport.client = ("127.0.0.2", 1234)  # type: ignore[attr-defined]
        assert (await client.get(STREAMS)).status_code == 200

    inside(Service(opened(engine)), talk)


def test_with_tokens_a_proxy_may_stand_in_front(engine: Engine, tmp_path: Path, tokens: dict[str, str]) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        client._transport.client = ("192.0.2.1", 1234)  # type: ignore[attr-defined]
        headers = {"X-Forwarded-For": "198.51.100.7", **bearer(tokens["scanner"])}
        assert (await client.get(STREAMS, headers=headers)).status_code == 200

    inside(service_of(engine, tmp_path), talk)


# --- texts and files --------------------------------------------------------------------------------------------------


def test_lone_surrogates_are_a_clients_error(engine: Engine) -> None:
    """As bytes of a URL, a header or a body, and as the escape \\ud800 in JSON."""
    surrogate = "%ED%A0%80"

    async def talk(client: httpx.AsyncClient) -> None:
        lone = "\ud800"
        for method, path in (
            ("GET", f"/{surrogate}"), ("GET", f"{STREAMS}/{surrogate}"),
            ("GET", f"{STREAMS}/a/recent?after={surrogate}"),
            ("POST", f"{STREAMS}/a/batches?report={surrogate}"), ("PUT", f"/v1/pool/experts/{surrogate}"),
        ):  # fmt: skip
            answer = await client.request(method, path, headers={"Content-Type": "application/json"}, content=b"{}")
            assert 400 <= answer.status_code < 500, answer.text
        expert = engine.lineup.pool.names[0]
        for body in (rb'{"on": "\ud800"}', rb'{"\ud800": true}', b'{"on": "\xed\xa0\x80"}', rb'"\ud800"'):
            json_body = {"content": body, "headers": {"Content-Type": "application/json"}}
            answer = await client.put(f"/v1/pool/experts/{expert}", **json_body)
            require_problem(answer, "invalid_request")
        assert (await client.post(f"{STREAMS}/ward/batches", files=form(png(1)))).status_code == 200
        for body in (rb'{"name": "\ud800"}', rb'{"name": "a", "note": "\udfff"}', b'{"name": "\xed\xa0\x80"}'):
            json_body = {"content": body, "headers": {"Content-Type": "application/json"}}
            answer = await client.post(f"{STREAMS}/ward/acknowledge", **json_body)
            assert 400 <= answer.status_code < 500, answer.text
        named = lone.encode("utf-8", "surrogatepass")
        for header in (b"content-type", b"host", b"origin", b"authorization", b"x-anything"):
            answer = await client.request("POST", f"{STREAMS}/a/batches", headers=[(header, named)], content=b"x")
            assert 400 <= answer.status_code < 500, answer.text
        part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="' + named + b'"\r\n\r\nx\r\n--x--\r\n'
        multipart = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await client.post(f"{STREAMS}/a/batches", content=part, headers=multipart)
        assert 400 <= answer.status_code < 500, answer.text

    inside(Service(opened(engine)), talk)


def test_a_problem_is_told_whatever_text_is_in_it() -> None:
    """Names of experts and classes come from files and may hold anything."""
    from mergestream.serving.http.problems import Problem, response

    body = json.loads(response(Problem("unknown_expert", "The experts are \ud800."), "id").body)
    assert body["code"] == "unknown_expert"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_tls_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "key.pem"
    key.write_text("key")
    key.chmod(mode)
    with pytest.raises(InputError, match=f"TLS key. Run: chmod 600 {key}"):
        serve(ServeOptions(tmp_path, port=0, state=tmp_path / "state", tls_cert=key, tls_key=key))
