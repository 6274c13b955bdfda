"""The residents of a switcher and what builds on what."""

from collections.abc import Iterable, Mapping, Sequence

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import ConfigError, UnknownNameError
from rlinf_plugins.scheduler.lock.resident import Resident


class Registry:
    """Residents by name; each may build on others, which come before it and leave after it."""

    def __init__(self) -> None:
        self._residents: dict[str, Resident] = {}
        self._after: dict[str, tuple[str, ...]] = {}

    def add(self, resident: Resident, after: Sequence[str]) -> None:
        """Register ``resident``.

        Raises:
            ConfigError: The name is taken, or the resident has no devices.
            UnknownNameError: ``after`` names a resident that was not added.
        """
        if resident.name in self._residents:
            raise ConfigError(f"resident {resident.name!r} was added before; names must differ")
        if not resident.footprint:
            raise ConfigError(f"resident {resident.name!r} has no devices; its footprint is empty")
        for name in after:
            self.get(name)
        self._residents[resident.name], self._after[resident.name] = resident, tuple(after)

    def remove(self, name: str) -> None:
        """Forget a resident nothing builds on."""
        del self._residents[name], self._after[name]

    def get(self, name: str) -> Resident:
        """Return a resident by name.

        Raises:
            UnknownNameError: It was not added; the message lists those that were.
        """
        if name not in self._residents:
            raise UnknownNameError(f"no resident is called {name!r}; {suggest(name, self._residents)}")
        return self._residents[name]

    def base(self, name: str) -> tuple[str, ...]:
        """Residents that ``name`` builds on directly."""
        return self._after[name]

    def footprint(self, name: str) -> Mapping[str, int]:
        """Bytes of ``name`` on each of its devices."""
        return self._residents[name].footprint

    def devices(self, names: Iterable[str]) -> frozenset[str]:
        """All devices of ``names``."""
        return frozenset(device for name in names for device in self.footprint(name))

    def with_bases(self, names: Iterable[str]) -> list[str]:
        """Return ``names`` and all they build on, each after its bases.

        Raises:
            UnknownNameError: A name was not added.
        """
        ordered: list[str] = []
        for name in names:
            self.get(name)
            for other in [*self.with_bases(self._after[name]), name]:
                if other not in ordered:
                    ordered.append(other)
        return ordered

    def with_dependents(self, names: Sequence[str]) -> list[str]:
        """Return ``names`` and all that build on them, each before its bases."""
        wanted = set(names)
        dependents = [n for n in self._residents if n not in wanted and set(self.with_bases([n])) & wanted]
        return [*dependents[::-1], *names]
