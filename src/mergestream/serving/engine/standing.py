"""Where a stream stands when its next batch comes: taken up from disk, carried over to other experts, in a method."""

from collections import OrderedDict

from mergestream.methods import Method
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine.encoding import state_from_json
from mergestream.serving.engine.persistence import Saved
from mergestream.serving.engine.registry import State, Stream
from mergestream.serving.engine.switching import Lineup, carried_over
from mergestream.serving.guards.stream_guards import Memory

OTHER_POOL = "the pool was loaded again, and its experts are others."
OTHER_METHOD = "the service was started with another method or other options."
OTHER_EXPERTS = "an expert was switched on or off, and this method learns from all of them together."


class LiveMethods:
    """At most `most` methods, each with merged weights [P]; the one used longest ago is set to another stream's state,
    so that memory does not grow with streams. For one thread at a time."""

    def __init__(self, lineup: Lineup, most: int) -> None:
        self._lineup, self._most = lineup, most
        self._methods: OrderedDict[str, tuple[Method, State | None]] = OrderedDict()

    def standing_at(self, stream: str, state: State) -> Method:
        """A method in exactly this state; nothing is restored where it stands there already."""
        method, stands = self._methods.pop(stream, (None, None))
        if method is None:
            full = len(self._methods) >= self._most
            method = self._methods.popitem(last=False)[1][0] if full else self._lineup.create_method()
        if stands is not state:
            method.load_state_dict({**method.identity, "state": state.method})
        # Until the step is over nobody knows where it stands.
        self._methods[stream] = method, None
        return method

    def stands_at(self, stream: str, state: State) -> None:
        method, _ = self._methods[stream]
        self._methods[stream] = method, state

    def forget(self, stream: str) -> None:
        self._methods.pop(stream, None)


def standing(stream: Stream, lineup: Lineup) -> tuple[State, str | None]:
    """Where a stream goes on from, on the experts in use, and why it begins again if it does."""
    sha256, names = lineup.identity["pool_sha256"], lineup.active.names
    beginning = State(sha256, names, {}, Memory())
    state = stream.state
    if state is None:
        return beginning, stream.restarted
    if state.pool_sha256 != sha256:
        return beginning, OTHER_POOL
    if state.experts == names:
        return state, None
    method = carried_over(state.method, state.experts, names)
    if method is None:
        return beginning, OTHER_EXPERTS
    return State(sha256, names, method, Memory()), None


def taken_up(saved: Saved, lineup: Lineup) -> Stream:
    """A stream as an earlier process left it, or at its beginning, with why."""
    stream = Stream(saved["stream"], steps=saved["steps"], images=saved["images"])
    try:
        state = state_from_json(saved.get("state"))
        stream.restarted = saved.get("lost") or _unfit(saved, state, lineup)
        stream.state = None if stream.restarted else state
    except MergestreamError as error:
        stream.restarted = str(error)
    return stream


def _unfit(saved: Saved, state: State | None, lineup: Lineup) -> str | None:
    """Why a state cannot be gone on from; None where it can."""
    if state is None:
        return None
    if (saved["method"], saved["options"]) != (lineup.method, lineup.options):
        return OTHER_METHOD
    return None if state.pool_sha256 == lineup.identity["pool_sha256"] else OTHER_POOL
