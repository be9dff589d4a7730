"""timm's published weights: from the hub if it answers, else from the local cache, else refused without delay."""

import ssl
import threading
import urllib.error
import urllib.request
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from mergestream.networks.allow_list import offline_hub
from mergestream.runtime.errors import NetworkError, unknown_name

PATIENCE = 2.0  # seconds
GATEWAY_ERRORS = (502, 503, 504)  # a proxy answered, not the hub


def load_published(network: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a timm network by name."""
    import timm
    from huggingface_hub import constants

    if not timm.is_model(network):
        raise unknown_name("network in timm", network, timm.list_models())
    online = is_reachable(constants.ENDPOINT)
    try:
        # Offline the client uses its cache only: it would try again for a minute.
        with nullcontext() if online else offline_hub():
            return timm.create_model(network, pretrained=True, **arguments).state_dict()
    except Exception as error:  # a hub may fail in any way
        reason = f"{error}" if online else f"{constants.ENDPOINT} cannot be reached and the cache lacks them"
        raise NetworkError(
            f"Cannot get timm's weights of '{network}': {reason}. Download them where there is a network, and give the "
            f"file: --init FILE.safetensors; or train from --init random."
        ) from error


def is_reachable(url: str, patience: float = PATIENCE) -> bool:
    """Whether a server answers anything at all in time; the look-up of its name counts."""
    reached = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")  # noqa: S310 the hub, as its client is configured
            urllib.request.urlopen(request, timeout=patience).close()  # noqa: S310
            reached.append(url)
        except urllib.error.HTTPError as error:
            if error.code not in GATEWAY_ERRORS:
                reached.append(url)
        except ssl.SSLError:
            reached.append(url)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError):  # the hub's own client may have other certificates
                reached.append(url)
        except (OSError, ValueError):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    return bool(reached)
