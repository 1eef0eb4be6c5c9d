"""Which hash maps of the match-action table a request is looked up in, and how.

Maps are probed best bound first. Those before the first that compares parts of a field are a stage of their own: an
exact hit above all wildcards derives nothing. In the other stage a map is left out if none of its entries begins with
the network of the request's source, names its tenant, or names its user, as packet classifiers do with their tuples: of
many masks with few entries, most are. Each of the three is looked at only if that is expected to leave maps out; the
network's length is chosen so that few are left.

What always holds: a map that could have a matching entry is probed. A reader sees the maps of each network, tenant or
user before a change or after it.
What it doesn't do: help if each mask has entries for the request's own network, tenant and user.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload.match_fields import FIELDS
from nic_offload.match_space import SOURCE, TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nic_offload.match_entry import Entry
    from nic_offload.match_space import Bucket, Layer, Space

__all__ = ["Probes", "Probing", "Selector", "Stage"]

NETWORKS_MAX = 16_384  # of all masks together, when maps are arranged; larger masks are always probed
CHOICES_MAX = 4_096  # sets of maps whose probes are kept; more are derived again
_WORTH_IT = 0.8  # nothing is looked at if a larger part of the maps remains

Step = tuple[int, int, "Callable[[Any], Any]", "Callable[[Any], Bucket | None]"]


class Probes(NamedTuple):
    """What to derive from a request first, then how to probe each map, with its bound and the next one's."""

    derived: tuple[tuple[int, int], ...]  # shifted
    masked: tuple[tuple[int, int], ...]
    steps: Sequence[Step]


class Selector(NamedTuple):
    """Leaves maps out by one field of a request. Sets of maps are bits, by their places."""

    field: int  # its index in a request
    shift: int  # from a source to its network
    near: dict[Any, int]  # the maps that may match, by the field's value
    other: int  # for any other value

    def value_of(self, space: Space, entry: Entry) -> Any:
        """The value that an entry of a map has in this field."""
        if self.field == SOURCE:
            return space.network_of(entry) >> self.shift - space.network_shift
        return space.name_of(entry, self.field)


class Stage:
    """Some of the maps."""

    __slots__ = ("_spaces", "bound", "made", "selectors")

    def __init__(self, spaces: Sequence[Space], selectors: tuple[Selector, ...] = ()) -> None:
        self._spaces = spaces
        self.bound = spaces[0].bound  # that of the first step, which is the highest
        self.selectors = selectors
        self.made: dict[int, Probes] = {}

    def probes(self, maps: int) -> Probes:
        """How to probe a set of maps."""
        found = self.made.get(maps)
        if found is None:
            found = _probes([space for at, space in enumerate(self._spaces) if maps >> at & 1])
            if len(self.made) >= CHOICES_MAX:
                self.made.clear()
            self.made[maps] = found
        return found

    def probes_for(self, request: Sequence[Any]) -> Probes:
        """How to probe the maps in which a request is looked up."""
        maps = -1
        for index, shift, near, other in self.selectors:
            maps &= near.get(request[index] >> shift if shift else request[index], other)
        return self.probes(maps)


class Probing:
    """How to probe all maps of some layers as they are now, by `stages`."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        spaces = [space for layer in layers for space in layer.spaces.values()]
        spaces.sort(key=lambda space: -space.bound)
        plain = 0
        while plain < len(spaces) and not any(shift for _, shift in spaces[plain].mask):
            plain += 1
        self._places = {space: at for at, space in enumerate(spaces[plain:])}
        self._optional: list[tuple[Selector, dict[Space, int]]] = []  # and the maps that it may leave out
        stages = []
        if plain:
            stages.append(Stage(spaces[:plain]))
        if self._places:
            self._choose()
            stages.append(Stage(spaces[plain:], tuple(selector for selector, _ in self._optional)))
        self.stages = tuple(stages)

    def added(self, space: Space, entry: Entry) -> None:
        """An entry was added to a map that was there already."""
        for selector, optional in self._optional:
            if space in optional:
                value = selector.value_of(space, entry)
                selector.near[value] = selector.near.get(value, selector.other) | 1 << optional[space]

    def _choose(self) -> None:
        """Choose what is looked at, and which maps are probed for each value."""
        spaces = list(self._places)
        few = _few(spaces, lambda space: space.networks)
        ways = [
            (SOURCE, shift, {one: at for one, at in few.items() if one.network_shift <= shift})
            for shift in sorted({space.network_shift for space in few})
        ]
        of_networks = min((self._arranged(*way) for way in ways), key=lambda one: one[0], default=None)
        of_names = [
            self._arranged(index, 0, optional)
            for index, optional in (
                (TENANT, _few(spaces, lambda space: space.tenants)),
                (USER, _few(spaces, lambda space: space.users)),
            )
            if optional
        ]
        for left, selector, optional in (*([] if of_networks is None else [of_networks]), *of_names):
            if left < _WORTH_IT * len(spaces):
                self._optional.append((selector, optional))

    def _arranged(
        self, index: int, shift: int, optional: dict[Space, int]
    ) -> tuple[float, Selector, dict[Space, int]]:
        """A selector, and how many maps it leaves if each known value, and any other, is as frequent."""
        other = sum(1 << at for space, at in self._places.items() if space not in optional)
        places = _places_of(optional, index, shift)
        left = len(self._places) - len(optional) + sum(map(len, places.values())) / (len(places) + 1)
        near = {value: other | sum(1 << at for at in some) for value, some in places.items()}
        return left, Selector(index, shift, near, other), optional


def _few(spaces: Sequence[Space], of: Callable[[Space], dict[Any, int] | None]) -> dict[Space, int]:
    """The maps that need not be probed for every request, with their places: those with the fewest of these."""
    sizes = sorted((len(values), at) for at, space in enumerate(spaces) if (values := of(space)))
    few, left = {}, NETWORKS_MAX
    for size, at in sizes:
        left -= size
        if left < 0:
            break
        few[spaces[at]] = at
    return few


def _places_of(optional: dict[Space, int], index: int, shift: int) -> dict[Any, set[int]]:
    """The places of the maps that have entries, by network, tenant or user."""
    places: dict[Any, set[int]] = {}
    for space, place in optional.items():
        if index == SOURCE:
            for network in space.networks or ():
                places.setdefault(network >> (shift - space.network_shift), set()).add(place)
        else:
            for name in (space.tenants if index == TENANT else space.users) or ():
                places.setdefault(name, set()).add(place)
    return places


def _probes(spaces: Sequence[Space]) -> Probes:
    below_of = [space.bound for space in spaces[1:]] + [-1] * bool(spaces)
    fields = sorted({field for space in spaces for field in space.mask if field[1]})
    derived = tuple(field for field in fields if field[1] > 0)
    masked = tuple(field for field in fields if field[1] < 0)
    place = {field: len(FIELDS) + position for position, field in enumerate(derived + masked)}
    return Probes(
        derived,
        masked,
        tuple(
            (space.bound, below, _picker([place.get(field, field[0]) for field in space.mask]), space.map.get)
            for space, below in zip(spaces, below_of, strict=True)
        ),
    )


def _picker(places: Sequence[int]) -> Callable[[Any], Any]:
    return itemgetter(*places) if places else _nothing


def _nothing(_view: Any) -> tuple[()]:
    return ()
