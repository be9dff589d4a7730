"""The engine with its audit log, opened in this process or in that of a replica."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.devices import resolve_device, resolve_dtype
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import one_of, parse_options, parse_value
from mergestream.runtime.plugins import load_plugins
from mergestream.serving.audit.chain import STREAMS, recent_lines, saved_links
from mergestream.serving.audit.keys import read_private_key
from mergestream.serving.audit.log_writer import AuditLog, NoAuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.revocation_watch import RevocationWatch
from mergestream.serving.guards.findings import GuardSettings
from mergestream.serving.options import ServeOptions
from mergestream.serving.quality.declared_prevalence import parse_prevalence
from mergestream.serving.quality.quality_monitor import QualitySettings


def open_engine(options: ServeOptions, on_append: Callable[[bool], None] = lambda _: None) -> Engine:
    """Load the pool, open the log and start the engine. `on_append` hears of each line: written or not."""
    load_plugins(options.plugins or ())
    pool, path = load_pool(options), options.log_file
    key = None if options.audit_key is None else read_private_key(options.audit_key)
    log = NoAuditLog() if path is None else AuditLog(path, key, on_append=on_append)
    try:
        return Engine(
            pool,
            options.method,
            dict(parse_options(options.options or ())),
            audit=log,
            state_folder=options.state / STREAMS,
            guards=guard_settings(options),
            quality=quality_settings(options),
            most_streams=options.max_streams,
            weights_hash=options.weights_hash,
            recent=() if path is None else recent_lines(path, key, saved_links(options.state / STREAMS)),
            load_pool=lambda: load_pool(options),
            revocations=RevocationWatch(options.pool, options.require_signed_by, options.state / "revoked.json"),
        )
    except BaseException:
        log.close()
        raise


def load_pool(options: ServeOptions) -> ExpertPool:
    """Load the experts on their device. The pool must say how pixels are prepared."""
    dtype = None if options.dtype is None else getattr(torch, resolve_dtype(options.dtype, options.device))
    about: dict[str, Any] = {"device": options.device, "dtype": dtype, "require_signed_by": options.require_signed_by}
    pool = ExpertPool.load(options.pool, **about, keep_revoked=True)  # the engine switches those off
    if pool.preprocessing is None:
        raise InputError(
            f"{options.pool} does not say how pixels are prepared for its network, so images cannot be served. "
            "Save it with preprocessing=mergestream.Preprocessing(size=…)."
        )
    return pool


def with_device(options: ServeOptions) -> ServeOptions:
    """The same options with 'auto' decided on this machine."""
    return replace(options, device=resolve_device(options.device))


def quality_settings(options: ServeOptions) -> QualitySettings:
    return QualitySettings(parse_prevalence(options.declared_prevalence), options.prediction_sets)


def guard_settings(options: ServeOptions) -> GuardSettings:
    settings: dict[str, Any] = dict(parse_options(options.guards or ()))
    for name in settings:
        one_of("guard", name, tuple(GuardSettings.__dataclass_fields__))
    if "fallback" in settings:  # here 'none' is a name
        settings["fallback"] = "none" if settings["fallback"] is None else str(settings["fallback"])
    if options.abstain_on is not None:
        settings["abstain_on"] = parse_value(f"[{options.abstain_on}]") if options.abstain_on != "none" else ()
    return GuardSettings(**settings)
