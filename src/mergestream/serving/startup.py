"""Start the service from its command-line options."""

import math
from collections.abc import Callable
from functools import partial

from mergestream.data.intake.limits import MEBIBYTE
from mergestream.pool.trust.trusted_signers import trusted_signers
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import make_folder
from mergestream.runtime.option_checks import parse_options
from mergestream.runtime.plugins import load_plugins
from mergestream.serving.answer_queue import QueueSettings
from mergestream.serving.audit.keys import read_private_key
from mergestream.serving.dicom_network.node import open_node
from mergestream.serving.http.gate import is_loopback
from mergestream.serving.http.request_limits import ServiceLimits
from mergestream.serving.http.server import run
from mergestream.serving.http.tokens import Tokens, require_private
from mergestream.serving.log_lines import log_to_stderr
from mergestream.serving.monitoring import Metrics
from mergestream.serving.open_engine import guard_settings, open_engine, quality_settings, with_device
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.engine_process import EngineProcess
from mergestream.serving.replicas.ray_cluster import require_ray_serve, start_replicas
from mergestream.serving.replicas.replicated_engine import ReplicatedEngine
from mergestream.serving.service import ENGINE_THREADS, AnyEngine, Service
from mergestream.serving.stream_owners import StreamOwners
from mergestream.serving.tracing import start_tracing
from mergestream.serving.watched_folder import Watcher, answer_images
from mergestream.serving.webhook import Webhook

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def serve(
    options: ServeOptions, print_line: Callable[[str], None] = lambda _: None, *, own_process: bool = True
) -> None:
    """Run the service until a signal ends it. Options are checked before it listens or loads anything.

    `own_process`: the engine runs in a process of its own, so that a second core talks HTTP meanwhile.
    """
    tokens = None if options.tokens is None else Tokens(options.tokens)
    options = with_device(options)
    _require_usable(options)
    one_thread = options.replicas == 1 and options.device != "cpu" and not own_process
    service = Service(
        partial(_open, options, own_process),
        _limits(options),
        tokens=tokens,
        # A web page cannot make a browser send a request that is addressed to these names.
        hosts=(*LOOPBACK_NAMES, options.host.lower()) if tokens is None else None,
        owners=StreamOwners(options.state / "owners.json", options.streams_per_token),
        # A GPU needs one thread: while a CUDA graph is captured no other thread may touch the device.
        threads=1 if one_thread else ENGINE_THREADS * options.replicas,
    )
    if options.watch is not None:
        make_folder(options.watch)
        answer = partial(answer_images, service, options.watch_reports)
        service.folder = Watcher(options.watch, answer, service.limits.intake)
    service.node = open_node(options)
    if options.webhook is not None:
        service.webhook = Webhook(options.webhook)
    stop_tracing = None if options.otlp is None else start_tracing(options.otlp)
    if service.node is not None or options.destinations is not None or options.shadow:
        from mergestream.serving.reports.report_delivery import deliver_reports  # it needs highdicom and matplotlib

        deliver_reports(service, options)
    log_to_stderr(as_json=options.json_log)
    for line in _notices(options):
        print_line(line)
    ready = "Ready: {url} (dashboard), {url}/docs. Stop it with Ctrl+C or SIGTERM."
    if service.node is not None and service.node.port is not None:
        print_line(f"DICOM node: {options.ae_title} at {options.dicom_host}, port {service.node.port}.")
    try:
        run(service, options, lambda url: print_line(ready.format(url=url)))
    finally:
        if stop_tracing is not None:
            stop_tracing()


def _open(options: ServeOptions, own_process: bool, metrics: Metrics) -> AnyEngine:
    """Open one engine, or several replicas on a cluster."""
    if options.replicas > 1:
        return start_replicas(options, ServiceLimits.answer_seconds, on_append=metrics.audit_line)
    if not own_process:
        return open_engine(options, metrics.audit_line)
    process = EngineProcess(options, calls=ENGINE_THREADS + 2)  # and an administrator's, and the status
    try:
        # Whether it lives is known: one that is busy for long is not gone.
        return ReplicatedEngine([process], silence=math.inf, on_append=metrics.audit_line, on_close=process.close)
    except BaseException:
        process.close()
        raise


def _require_usable(options: ServeOptions) -> None:
    """Check what would be unsafe, or would fail only after the service listens."""
    if options.tokens is None and not is_loopback(options.host):
        raise InputError(
            f"Everyone who can reach {options.host} could use the service. Make a token with 'mergestream serve-token' "
            "and give its file as --tokens, or listen at 127.0.0.1."
        )
    if options.tls_key is not None:
        require_private(options.tls_key, 0o027, "Others on this machine may read or change the TLS key.")
    load_plugins(options.plugins or ())
    guard_settings(options)
    quality_settings(options)
    parse_options(options.options or ())
    if options.audit_key is not None:
        read_private_key(options.audit_key)
    trusted_signers(options.require_signed_by)
    if options.replicas > 1:
        require_ray_serve()
    make_folder(options.state)


def _limits(options: ServeOptions) -> ServiceLimits:
    return ServiceLimits(
        body_bytes=options.max_body_mib * MEBIBYTE,
        rate=options.rate,
        burst=max(1, round(2 * options.rate)),
        queue=QueueSettings(
            single=_single(options),
            count=options.max_batch,
            seconds=options.max_wait_ms / 1000,
            longest_wait=options.longest_wait,
        ),
    )


def _single(options: ServeOptions) -> bool | None:
    """Whether each image is answered by itself; refused where a method has no answer to one image alone."""
    if dict(parse_options(options.options or ())).get("recalibrate_bn") is not True:  # a window has an answer
        return options.single_image_answers
    if options.single_image_answers:
        raise InputError(
            "With recalibrate_bn=true the statistics of a batch are estimated from its images: one image alone has no "
            "defined answer. Leave out --single-image-answers, or recalibrate_bn."
        )
    return False


def _notices(options: ServeOptions) -> list[str]:
    """Lines for the operator before the service loads."""
    notices = ["For research. Not a medical device.", _log_notice(options)]
    if not is_loopback(options.host) and options.tls_cert is None:
        notices.append("Warning: without --tls-cert and --tls-key, tokens and images cross the network unencrypted.")
    if options.require_signed_by is None:
        notices.append("The experts' signatures are not checked: --require-signed-by DIR names the trusted signers.")
    if options.shadow:
        notices.append("Shadow mode: reports are made and held, none is sent.")
    return [*notices, f"Loading {options.pool} …"]


def _log_notice(options: ServeOptions) -> str:
    if options.no_audit:
        return "No audit log is kept."
    if options.replicas == 1:
        files = f"Audit log: {options.log_file}"
    else:
        logs = (str(options.for_replica(index).log_file) for index in range(options.replicas))
        files = f"Audit logs, one per engine: {', '.join(logs)}"
    unsigned = " (not signed: give a key made by 'mergestream audit key' as --audit-key)"
    return files if options.audit_key else files + unsigned
