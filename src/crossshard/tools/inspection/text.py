"""Communication reports as text: a table of collectives, and the totals under it."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from crossshard._text import count, exact_size, table
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.inspection.parameters import Parameters

if TYPE_CHECKING:
    from crossshard.tools.inspection.report import Communication

_HEAD = ("collective", "operands", "sent per shard", "groups", "when", "source")

# XLA marks sums that it widens, and may convert what it only moves without a mark.
_SUMS = {"all-reduce", "reduce-scatter"}


def collective_table(collectives: Iterable[Collective]) -> str:
    """A plain text table of collectives."""
    return table(_HEAD, list(map(_row, collectives)))


def _row(each: Collective) -> tuple[str, ...]:
    """A collective as a row of the table, one text for each column."""
    shown = [str(operand) for operand in each.operands[:2]]
    more = len(each.operands) - len(shown)
    if more:
        shown.append(f"and {more} more")
    when = [f"{'?' if each.times is None else each.times} times"] * each.in_loop
    when += ["in a branch"] * each.in_branch
    when += [_beside(each)] * each.asynchronous
    among = f"{len(each.groups)} of {each.group_size}"
    if each.within_shard:
        among += " in a shard"
    if each.kind == "collective-permute":
        among = f"{len(each.groups)} pairs"
    return (
        each.kind,
        ", ".join(shown),
        exact_size(each.bytes_sent + each.scalar_bytes_sent),
        among,
        ", ".join(when),
        _where(each),
    )


def _beside(each: Collective) -> str:
    if each.matrix_products:
        return f"behind {count(each.matrix_products, 'matrix product')}"
    return f"behind {count(each.other_kernels, 'kernel')}" if each.other_kernels else "exposed"


def _where(each: Collective) -> str:
    line = each.source or each.op_name or each.name
    return f"{line} (1 of {each.combined} combined)" if each.combined > 1 else line


def totals(report: "Communication") -> list[str]:
    """The lines under the table: total bytes, lower bound and memory."""
    scalars = report.scalar_bytes_sent
    extra = f", and {exact_size(scalars)} for scalars" * bool(scalars)
    branches = any(each.in_branch for each in report.counted)
    least = "at least " if report.uncounted_loops else "at most " * branches
    lines = [
        f"each of {report.devices} devices sends {least}{exact_size(report.bytes_sent)}{extra}"
    ]
    lines += _by_axes(report)
    if report.uncounted_loops:
        lines.append("a loop of unknown length (?) is counted once")
    if branches:
        lines.append(
            f"of each conditional the branch that sends most is counted: "
            f"{exact_size(report.bytes_in_branches)} of these"
        )
    lines += _bound(report, least)
    lines += _overlap(report)
    if report.widened:
        lines.append(_widening(report))
    if report.memory is not None:
        parts = dataclasses.asdict(report.memory).items()
        words = (f"{name} {exact_size(number)}" for name, number in parts)
        lines.append(f"memory per device: {', '.join(words)}")
    return lines


def _by_axes(report: "Communication") -> list[str]:
    """The bytes along each axis, if there are several or some stay within a shard."""
    within = {", ".join(each.axes) for each in report.collectives if each.within_shard}
    if len(report.bytes_by_axes) < 2 and not within:
        return []
    parts = (
        f"{axes} {exact_size(sent)}" + ", within a shard and not in the bound" * (axes in within)
        for axes, sent in report.bytes_by_axes.items()
    )
    return [f"along {'; '.join(parts)}"]


def _bound(report: "Communication", least: str) -> list[str]:
    if report.lower_bound is None:
        return ["the parameters were not found in the program, so there is no lower bound"]
    ratio = "" if report.ratio is None else f"; ratio {least}{report.ratio:.3f}"
    alike: dict[tuple[int, int], list[Parameters]] = defaultdict(list)
    for each in report.parameters:
        alike[each.shards, each.updates].append(each)
    bounds = [_of_alike(found) for _, found in sorted(alike.items(), reverse=True)]
    if len(bounds) == 1:
        return [bounds[0] + ratio]
    return [*bounds, f"together {exact_size(report.lower_bound)}{ratio}"]


def _of_alike(found: list[Parameters]) -> str:
    """The bound of parameters with the same shards and updates."""
    shards, updates = found[0].shards, found[0].updates
    times = f" · {updates} updates" * (updates != 1)
    needed = exact_size(sum(each.lower_bound for each in found))
    of = f"for {exact_size(sum(each.bytes for each in found))} of parameters"
    if all(each.on_wire == 2 * each.bytes for each in found):
        return f"{shards} shards need 2(N−1)/N · P{times} = {needed} {of}"
    gathered = exact_size(sum(x.bytes if x.gathered is None else x.gathered for x in found))
    reduced = exact_size(sum(x.bytes if x.reduced is None else x.reduced for x in found))
    return (
        f"{shards} shards need (N−1)/N · (G + R){times} = {needed} {of}, G = {gathered} "
        f"gathered, R = {reduced} reduced"
    )


def _overlap(report: "Communication") -> list[str]:
    if not report.bytes_sent:
        return []
    if not any(each.asynchronous and each.bytes_sent for each in report.collectives):
        return ["no collective is asynchronous, so all bytes are exposed"]
    return [
        f"{exact_size(report.bytes_behind_matrix_products)} ({report.hidden_share:.0%}) behind "
        f"matrix products, {exact_size(report.bytes_behind_other_kernels)} behind other kernels, "
        f"{exact_size(report.bytes_exposed)} exposed"
    ]


def _widening(report: "Communication") -> str:
    """The line on dtypes that are wider than the parameters, and what widened them."""
    kinds: dict[str, list[str]] = {}
    wide = {*report.widened}
    for each in (x for x in report.collectives if x.bytes_sent and wide & {*x.dtypes}):
        who = "by the step, or by XLA for CPUs"
        if each.widened:
            who = "by XLA, as it does for CPUs"
        elif each.kind in _SUMS:
            who = "by the step itself"
        kinds.setdefault(who, []).append(each.kind)
    sent, parameters = ", ".join(report.widened), ", ".join(report.parameter_dtypes)
    by = [f"{', '.join(dict.fromkeys(found))} {who}" for who, found in kinds.items()]
    return f"sent as {sent}, but the parameters are {parameters}; widened: {'; '.join(by)}"
