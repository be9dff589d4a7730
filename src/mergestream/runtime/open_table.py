"""Tables of methods and data sets that other packages add to, by entry points or in Python, without a fork."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.messages import log_once
from mergestream.runtime.plugins import note_registration, place_of

T = TypeVar("T")
_log = logging.getLogger(__name__)


class OpenTable(Mapping[str, T], Generic[T]):
    """mergestream's own items by name, then registered ones, then those that installed packages offer.

    Entry points are read at the first look beyond our own names, and a package is imported when its item is used.
    `check(name, item)` refuses what cannot be used; `maker(item)` is the class or function behind an item.
    """

    def __init__(
        self, kind: str, group: str, own: Mapping[str, T], check: Callable[[str, Any], T], maker: Callable[[T], Any]
    ) -> None:
        self.kind, self.group, self.own, self._check, self._maker = kind, group, own, check, maker
        self._registered: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self._registered:
            self._registered[name] = self._load(name)
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.own, *self._registered, *self._offered]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._registered or name in self._offered

    def usable(self) -> dict[str, T]:
        """Every item that can be loaded; a package that cannot is reported in one warning and left out."""
        items: dict[str, T] = {}
        for name in self:
            try:
                items[name] = self[name]
            except MergestreamError as error:
                log_once(_log, logging.WARNING, str(error))
        return items

    def register(self, name: str, item: Any) -> T:
        """Add an item. A name that is taken is refused, unless the same source defines it again."""
        checked = self._check(name, item)
        maker = self._maker(checked)
        others = [package_of(each) for each in self._offered.get(name, ()) if each.module != maker.__module__]
        if name in self._registered and (place := place_of(self._maker(self._registered[name]))) != place_of(maker):
            others.append(place)
        if name in self.own or others:
            owner = "mergestream itself" if name in self.own else others[0]
            raise InputError(f"There is already a {self.kind} '{name}', of {owner}: choose another name.")
        self._registered[name] = checked
        note_registration()
        return checked

    def origin(self, name: str) -> str:
        """Which package or file a name comes from; empty for mergestream's own."""
        if name in self.own:
            return ""
        offers = self._offered.get(name)
        return " and ".join(map(package_of, offers)) if offers else place_of(self._maker(self[name]))

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name; those with one of our own names are ignored with a warning."""
        offered: dict[str, list[EntryPoint]] = {}
        for each in sorted(entry_points(group=self.group), key=lambda each: (package_of(each), each.name)):
            if each.name in self.own:
                message = f"The {self.kind} '{each.name}' of {package_of(each)} is ignored: mergestream has its own."
                log_once(_log, logging.WARNING, message)
            else:
                offered.setdefault(each.name, []).append(each)
        return offered

    def _load(self, name: str) -> T:
        offers = self._offered.get(name)
        if offers is None:
            raise KeyError(name)
        packages = " and ".join(map(package_of, offers))
        if len(offers) > 1:
            raise InputError(f"Several packages offer the {self.kind} '{name}': {packages}. Uninstall all but one.")
        try:
            return self._check(name, offers[0].load())
        except Exception as error:  # whatever a package of somebody else raises while it is imported
            raise InputError(f"The {self.kind} '{name}' of {packages} cannot be used: {error!r}.") from error


def package_of(offer: EntryPoint) -> str:
    """The package behind an entry point."""
    return offer.value if offer.dist is None else f"the package {offer.dist.name} {offer.dist.version}"
