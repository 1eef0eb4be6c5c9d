"""Which hash maps of the match-action table a request is looked up in, and how.

Maps are probed best bound first. Those before the first that compares parts of a field are a stage of their own: an
exact hit above all wildcards derives nothing. In the other stage a map is left out if none of its entries begins with
the network of the request's source, as packet classifiers do with their tuples: of many masks with few entries, most
are. The network's length is chosen so that few maps are left for a request; or maps are left out by the request's
tenant, if that leaves fewer, as behind a proxy from which all requests come.

What always holds: a map that could have a matching entry is probed. A reader sees each network's maps before a change
or after it.
What it doesn't do: help if each mask has entries for the request's own network and for its tenant.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload.match_fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nic_offload.match_entry import Entry
    from nic_offload.match_space import Bucket, Layer, Space

__all__ = ["BY_TENANT", "Probes", "Probing", "Stage"]

NETWORKS_MAX = 16_384  # of all masks together, when maps are arranged; larger masks are always probed
_WORTH_IT = 0.8  # neither is looked at if a larger part of the maps remains for a request
BY_TENANT = -1  # in the place of a shift

Step = tuple[int, int, "Callable[[Any], Any]", "Callable[[Any], Bucket | None]"]


class Probes(NamedTuple):
    """What to derive from a request first, then how to probe each map, with its bound and the next one's."""

    derived: tuple[tuple[int, int], ...]  # shifted
    masked: tuple[tuple[int, int], ...]
    steps: Sequence[Step]


class Stage(NamedTuple):
    """Some of the maps."""

    bound: int  # that of the first step, which is the highest
    shift: int  # from a source to its network, or BY_TENANT
    near: dict[Any, Probes]  # by network or tenant; empty if all maps are probed for any
    other: Probes  # for any other one


class Probing:
    """How to probe all maps of some layers as they are now, by `stages`."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        spaces = [space for layer in layers for space in layer.spaces.values()]
        spaces.sort(key=lambda space: -space.bound)
        plain = 0
        while plain < len(spaces) and not any(shift for _, shift in spaces[plain].mask):
            plain += 1
        self._spaces = spaces[plain:]
        self._made: dict[frozenset[int], Probes] = {}
        self._choose()
        stages = []
        if plain:
            stages.append(Stage(spaces[0].bound, 0, {}, _probes(spaces[:plain])))
        if self._spaces:
            other = self._probes_of(frozenset())
            stages.append(Stage(self._spaces[0].bound, self._shift, self._near, other))
        self.stages = tuple(stages)

    def added(self, space: Space, entry: Entry) -> None:
        """An entry was added to a map that was there already."""
        place = self._optional.get(space)
        if place is None:
            return  # always probed
        wide: Any = space.tenant_of(entry) if self._shift == BY_TENANT else space.network_of(entry)
        if self._shift != BY_TENANT:
            wide >>= self._shift - space.network_shift
        places = self._places.get(wide, frozenset())
        if place not in places:
            self._places[wide] = places | {place}
            self._near[wide] = self._probes_of(places | {place})

    def _choose(self) -> None:
        """Choose the length of networks, and which maps are probed for each."""
        self._shift = 0
        self._optional: dict[Space, int] = {}  # maps that are probed for some networks only
        self._near: dict[Any, Probes] = {}
        self._places: dict[Any, frozenset[int]] = {}
        few = _few(self._spaces, lambda space: space.networks)
        best = _WORTH_IT * len(self._spaces)
        shifts = {space.network_shift for space in few}
        ways = [
            (shift, {one: at for one, at in few.items() if one.network_shift <= shift}) for shift in shifts
        ]
        if of_tenants := _few(self._spaces, lambda space: space.tenants):
            ways.append((BY_TENANT, of_tenants))
        for shift, optional in ways:
            places = _places_of(optional, shift)
            left = len(self._spaces) - len(optional) + sum(map(len, places.values())) / len(places)
            if left < best:
                best, self._shift, self._optional = left, shift, optional
                self._places = {value: frozenset(some) for value, some in places.items()}
        for network, some in self._places.items():
            self._near[network] = self._probes_of(some)

    def _probes_of(self, places: frozenset[int]) -> Probes:
        """Those of the maps that are always probed and of these."""
        if places not in self._made:
            optional = frozenset(self._optional.values())
            here = [space for at, space in enumerate(self._spaces) if at in places or at not in optional]
            self._made[places] = _probes(here)
        return self._made[places]


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


def _places_of(optional: dict[Space, int], shift: int) -> dict[Any, set[int]]:
    """The places of the maps that have entries, by network or tenant."""
    places: dict[Any, set[int]] = {}
    for space, place in optional.items():
        if shift == BY_TENANT:
            for tenant in space.tenants or ():
                places.setdefault(tenant, set()).add(place)
        else:
            for network in space.networks or ():
                places.setdefault(network >> (shift - space.network_shift), set()).add(place)
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
