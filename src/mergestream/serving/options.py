"""The options of `mergestream serve`: one description for the command line, the service and its engines."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of, whole_number

DTYPES, DEVICES = ("float32", "bfloat16", "float16"), ("auto", "cpu", "cuda")
File = Path | None
Texts = list[str] | None


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


@dataclass(frozen=True)
class ServeOptions:
    """Options of the service. They can be sent to another process; paths are those of the machine it runs on."""

    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")]
    host: Annotated[str, _option("Address to listen on; other than loopback needs --tokens.")] = "127.0.0.1"
    port: Annotated[int, _option("Port; 0 takes a free one.", min=0, max=65535)] = 8000
    method: Annotated[str, _option("Name of the method.")] = "entropy_adaptive"
    options: Annotated[Texts, _option("An option of the method: 'momentum=0.9'; repeat for more.", "--option")] = None
    plugins: Annotated[Texts, _option("A module or .py file with methods; repeat for more.", "--plugin")] = None
    guards: Annotated[Texts, _option("A setting of the guards: 'fallback=uniform'; repeat for more.", "--guard")] = None
    abstain_on: Annotated[
        str | None,
        _option(
            "Codes of findings that leave an image undecided, separated by commas; none: no finding does.",
            show_default="blank_pictures,structureless_pictures,near_uniform_entropies",
        ),
    ] = None
    single_image_answers: Annotated[
        bool | None,
        _option(
            "Answer each image from the stream's past and itself alone, never together with others.",
            show_default="for /images, not for /batches",
        ),
    ] = None
    declared_prevalence: Annotated[
        str | None, _option("The site's class shares, 'class=0.02,other=0.98' or a YAML file, to compare answers with.")
    ] = None
    prediction_sets: Annotated[
        float | None, _option("Give each image a set of classes that holds the true one with this chance, as in 0.9.")
    ] = None
    device: Annotated[str, _option("auto, cpu or cuda.")] = "auto"
    dtype: Annotated[str | None, _option("float32, bfloat16, float16 or auto.", show_default="that of the pool")] = None
    state: Annotated[Path, _option("Folder for the streams' states and the audit log.")] = Path("mergestream-service")
    audit: Annotated[File, _option("The audit log.", show_default="audit.jsonl in the --state folder")] = None
    audit_key: Annotated[File, _option("Private key that signs the log, made by 'mergestream audit key'.")] = None
    no_audit: Annotated[bool, _option("Keep no audit log.", "--no-audit")] = False
    require_signed_by: Annotated[
        File,
        _option("Folder of trusted public keys and CA certificates; use only experts that one of them has signed."),
    ] = None
    weights_hash: Annotated[
        str | None,
        _option(
            "weights: hash each step's merged weights; state: hash what they follow from (pool, options, state).",
            show_default="weights on a CPU, state on a GPU",
        ),
    ] = None
    tokens: Annotated[File, _option("Tokens file, made by 'mergestream serve-token'.")] = None
    watch: Annotated[File, _option("Also answer files put into this folder.")] = None
    watch_reports: Annotated[bool, _option("Write DICOM structured reports there, too.", "--watch-reports")] = False
    dicom_port: Annotated[
        int | None, _option("Receive DICOM objects (C-STORE) at this port; 0 takes a free one.", min=0, max=65535)
    ] = None
    dicom_host: Annotated[
        str, _option("Address of the DICOM node; other than loopback needs callers in the rules.")
    ] = "127.0.0.1"
    ae_title: Annotated[str, _option("AE title of the DICOM node.")] = "MERGESTREAM"
    dicom_rules: Annotated[File, _option("Rules file (YAML): who may send what to which stream.")] = None
    dicom_tls_cert: Annotated[File, _option("TLS certificate of the DICOM node (PEM).")] = None
    dicom_tls_key: Annotated[File, _option("Its private key (PEM).")] = None
    dicom_tls_ca: Annotated[File, _option("Senders need a certificate signed by this authority (PEM).")] = None
    destinations: Annotated[File, _option("Destinations file (YAML): where reports are sent.")] = None
    shadow: Annotated[bool, _option("Make reports, but send none.", "--shadow")] = False
    webhook: Annotated[str | None, _option("URL that gets a small JSON document when an alarm begins.")] = None
    otlp: Annotated[str | None, _option("URL of an OpenTelemetry collector that gets traces.")] = None
    max_batch: Annotated[int, _option("Largest batch of single images.", min=1)] = 32
    max_wait_ms: Annotated[float, _option("How long a single image waits for others to join it, at most.", min=0)] = (
        50.0
    )
    longest_wait: Annotated[float, _option("Seconds; an image that would wait longer is refused.", min=0.1)] = 5.0
    max_streams: Annotated[int, _option("Most streams per engine.", min=1)] = 64
    streams_per_token: Annotated[int, _option("Most streams of one client's token.", min=1)] = 16
    max_body_mib: Annotated[int, _option("Largest request.", min=1)] = 256
    rate: Annotated[float, _option("Requests per second and token, or address; 0: no limit.", min=0)] = 100.0
    connections_per_address: Annotated[int, _option("Most open connections per client address.", min=1)] = 256
    proxies: Annotated[Texts, _option("Address without that limit; repeat for more.", "--proxy")] = None
    grace_seconds: Annotated[float, _option("How long SIGTERM waits for requests in progress.", min=0)] = 20.0
    tls_cert: Annotated[File, _option("TLS certificate (PEM).")] = None
    tls_key: Annotated[File, _option("Its private key (PEM).")] = None
    json_log: Annotated[bool, _option("Write log lines as JSON.", "--json-log")] = False
    replicas: Annotated[int, _option("Engines; more than one run behind Ray Serve.", min=1)] = 1

    def __post_init__(self) -> None:
        hints = get_type_hints(ServeOptions, include_extras=True)
        for field in fields(self):
            kind, about = get_args(hints[field.name])
            if about.min is not None and getattr(self, field.name) is not None:
                check = whole_number if kind is int else number
                check(field.name, getattr(self, field.name), low=about.min)
        one_of("device", self.device, DEVICES)
        if self.weights_hash is not None:
            one_of("weights_hash", self.weights_hash, ("weights", "state"))
        if self.dtype is not None:
            one_of("dtype", self.dtype, (*DTYPES, "auto"))
        if self.no_audit and (self.audit or self.audit_key):
            raise InputError("--no-audit keeps no log: leave out --audit and --audit-key, or leave out --no-audit.")
        if self.replicas > 1 and self.audit is not None:
            raise InputError("With --replicas each engine has its own log in the --state folder: leave out --audit.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("TLS takes both --tls-cert and --tls-key.")
        if (self.dicom_tls_cert is None) != (self.dicom_tls_key is None) or (
            self.dicom_tls_ca and not self.dicom_tls_cert
        ):
            raise InputError("TLS of the DICOM node takes both --dicom-tls-cert and --dicom-tls-key.")

    @property
    def log_file(self) -> Path | None:
        return None if self.no_audit else self.audit or self.state / "audit.jsonl"

    def for_replica(self, index: int) -> "ServeOptions":
        """The options of one engine of several, with a state folder and a log of its own."""
        return replace(self, state=self.state / f"engine-{index:03d}", audit=None)

    def absolute(self) -> "ServeOptions":
        """The same options for a process with another working folder."""
        plugins = [str(Path(each).absolute()) if each.endswith(".py") else each for each in self.plugins or ()]
        paths = {name: getattr(self, name) for name in ("pool", "state", "audit_key", "require_signed_by")}
        absolute: dict[str, Any] = {name: path and path.absolute() for name, path in paths.items()}
        shares = self.declared_prevalence
        if shares is not None and shares.endswith((".yaml", ".yml")):
            absolute["declared_prevalence"] = str(Path(shares).absolute())
        return replace(self, **absolute, plugins=plugins or None)
