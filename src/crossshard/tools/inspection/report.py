"""Communication reports: data classes and JSON."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable

from crossshard.tools.inspection.collectives import KERNELS, KINDS, NOTHING, PRODUCTS, Collective
from crossshard.tools.inspection.hlo import width
from crossshard.tools.inspection.parameters import Parameters
from crossshard.tools.inspection.text import collective_table, totals

# The properties that JSON has in addition to the attributes.
_COUNTED = (
    *("bytes_sent", "scalar_bytes_sent", "parameter_bytes", "parameter_dtypes"),
    *("bytes_in_branches", "bytes_by_axes", "bytes_between_shards", "lower_bound", "ratio"),
    *("bytes_behind_matrix_products", "bytes_behind_other_kernels", "bytes_exposed"),
    "hidden_share",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device, from the compiler's memory analysis.

    Attributes:
      argument: the arguments.
      output: the results.
      temp: the temporaries.
      alias: the arguments that are aliased to outputs.
      peak: the peak memory.
    """

    argument: int
    output: int
    temp: int
    alias: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of one call of a compiled program, on each of its devices.

    Scalar operands, such as losses and metrics, are listed but not counted in ``bytes_sent``, the
    lower bound or the ratio. Of a conditional's branches, that which sends most is counted, so that
    a call sends at most as much.

    Attributes:
      collectives: in the order in which they run.
      devices: the number of devices that the program runs on.
      shards: the number of shards that keep a copy of the parameters, of most of their bytes if it
        differs; without known parameters, the number of devices that collectives connect.
      parameters: the parameters by dtype and shards; empty if neither found nor given.
      memory: the compiler's memory analysis, or ``None``.

    >>> import jax, jax.numpy as jnp
    >>> import crossshard
    >>> report = crossshard.inspect(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)))
    >>> report.devices, report.bytes_sent, report.ratio
    (1, 0, None)
    """

    collectives: tuple[Collective, ...]
    devices: int
    shards: int
    parameters: tuple[Parameters, ...]
    memory: Memory | None

    @property
    def counted(self) -> tuple[Collective, ...]:
        """The collectives without those in branches that send less than another, and rare ones."""
        return tuple(each for each in self.collectives if each.counted)

    @property
    def bytes_sent(self) -> float:
        """The bytes that one shard sends, without scalars."""
        return sum(each.bytes_sent for each in self.counted)

    @property
    def bytes_in_branches(self) -> float:
        """Those of them that it sends only if a conditional takes the branch that sends most."""
        return sum(each.bytes_sent for each in self.counted if each.in_branch)

    @property
    def scalar_bytes_sent(self) -> float:
        """The bytes that one shard sends for scalars."""
        return sum(each.scalar_bytes_sent for each in self.counted)

    @property
    def bytes_by_axes(self) -> dict[str, float]:
        """The bytes that one shard sends along each mesh axis, or several, without scalars.

        Those of collectives whose axes are unknown are left out.
        """
        found: dict[str, float] = defaultdict(float)
        for each in self.counted:
            if each.bytes_sent and each.axes:
                found[", ".join(each.axes)] += each.bytes_sent
        return dict(found)

    @property
    def bytes_between_shards(self) -> float:
        """``bytes_sent`` without what devices send to others with the same data."""
        return sum(each.bytes_sent for each in self.counted if not each.within_shard)

    @property
    def bytes_behind_matrix_products(self) -> float:
        """The bytes that a shard sends while matrix products are scheduled, without scalars."""
        return self._bytes_behind(PRODUCTS)

    @property
    def bytes_behind_other_kernels(self) -> float:
        """The bytes that it sends while only other kernels are, such as those of the update."""
        return self._bytes_behind(KERNELS)

    @property
    def bytes_exposed(self) -> float:
        """The bytes that it sends while nothing else is; all those of synchronous collectives."""
        return self._bytes_behind(NOTHING)

    @property
    def hidden_share(self) -> float | None:
        """The share of ``bytes_sent`` behind matrix products; ``None`` if nothing is sent."""
        return self.hidden_share_of(*KINDS)

    def hidden_share_of(self, *kinds: str) -> float | None:
        """``hidden_share`` of some kinds of collectives only; ``None`` if they send nothing.

        Gradients travel in ``"all-reduce"`` and ``"reduce-scatter"``; between CPUs of a job in
        ``"all-to-all"``, too.
        """
        sent = sum(each.bytes_sent for each in self.counted if each.kind in kinds)
        return self._bytes_behind(PRODUCTS, kinds) / sent if sent else None

    def _bytes_behind(self, what: str, kinds: Iterable[str] = KINDS) -> float:
        return sum(
            each.bytes_sent for each in self.counted if each.behind == what and each.kind in kinds
        )

    @property
    def parameter_bytes(self) -> int | None:
        """The bytes of one copy of the parameters; ``None`` if unknown."""
        return sum(each.bytes for each in self.parameters) or None

    @property
    def parameter_dtypes(self) -> tuple[str, ...]:
        """The known dtypes of the parameters by XLA's names, each once."""
        return tuple(dict.fromkeys(each.dtype for each in self.parameters if each.dtype))

    @property
    def lower_bound(self) -> float | None:
        """2(N−1)/N · P: the least that one of N shards sends to average P bytes.

        Of parameters that rest in parts, (N−1)/N of the bytes that are gathered and reduced, in the
        dtypes that are sent; see ``Parameters``. Summed over parameters with different numbers of
        shards and over the updates of a loop.
        """
        return sum(each.lower_bound for each in self.parameters) if self.parameters else None

    @property
    def ratio(self) -> float | None:
        """``bytes_between_shards`` over the lower bound; ``None`` if there is no bound."""
        return self.bytes_between_shards / self.lower_bound if self.lower_bound else None

    @property
    def uncounted_loops(self) -> tuple[Collective, ...]:
        """The collectives in loops of unknown length, counted once."""
        return tuple(each for each in self.collectives if each.times is None)

    @property
    def widened(self) -> tuple[str, ...]:
        """The dtypes sent that are wider than those of all parameters."""
        widest = max(map(width, self.parameter_dtypes), default=math.inf)
        sent = (dtype for each in self.collectives if each.bytes_sent for dtype in each.dtypes)
        return tuple(dict.fromkeys(dtype for dtype in sent if width(dtype) > widest))

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON.

        The keys are the attributes of this class and of its fields, and the properties
        ``bytes_sent``, ``scalar_bytes_sent``, ``bytes_in_branches``, ``bytes_by_axes``,
        ``bytes_between_shards``, ``parameter_bytes``, ``parameter_dtypes``, ``lower_bound``,
        ``ratio``, ``bytes_behind_matrix_products``, ``bytes_behind_other_kernels``,
        ``bytes_exposed`` and ``hidden_share``.
        """
        fields = dataclasses.asdict(self)
        for key in _COUNTED:
            fields[key] = getattr(self, key)
        return json.dumps(fields, indent=indent)

    def table(self) -> str:
        """The collectives as a plain text table, followed by the totals."""
        return "\n".join([collective_table(self.collectives), *self.totals()])

    def __str__(self) -> str:
        return self.table()

    def totals(self) -> list[str]:
        """The lines under the table: total bytes, lower bound and memory."""
        return totals(self)
