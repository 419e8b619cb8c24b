"""Addresses: where the coordinator of a job listens. Whoever reaches it can end the job."""

import errno
import ipaddress
import re
import socket

from crossshard.errors import ArgumentError

# Every interface of the machine, in words.
ALL_INTERFACES = "all interfaces"


def bind_address(coordinator_address: str, bind: str | None) -> str:
    """Where process 0 listens: at the interface that the address names, unless told otherwise.

    Args:
      coordinator_address: ``host:port``, which the other processes call.
      bind: the address of another interface, or ``"all interfaces"``.

    Raises:
      ArgumentError: the address is not ``host:port``, its host is unknown, or it is not that of an
        interface of this machine.
    """
    host, port = split_address(coordinator_address)
    if bind == ALL_INTERFACES:
        return f"[::]:{port}"
    found = _resolved(host if bind is None else bind)
    if bind is not None and ipaddress.ip_address(found).is_unspecified:
        raise ArgumentError(
            f"bind={bind!r} listens on every interface of this machine, to anyone who reaches it. "
            f"If that is meant, write bind={ALL_INTERFACES!r}."
        )
    if not _is_of_this_machine(found):
        raise ArgumentError(
            f"{found}, for {bind or host!r}, is not the address of an interface of this machine, "
            f"so process 0 cannot listen there. Pass bind= with the address of one, or "
            f"bind={ALL_INTERFACES!r}."
        )
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of ``host:port`` or ``[IPv6]:port``.

    Raises:
      ArgumentError: it is neither.
    """
    parts = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]+)):(\d{1,5})", address)
    if parts is None or not 0 < int(parts[3]) < 65536:
        raise ArgumentError(
            f"coordinator_address must be host:port, as 10.0.0.1:1234 or [fe80::1]:1234; got "
            f"{address!r:.100}."
        )
    return parts[1] or parts[2], int(parts[3])


def free_port(host: str) -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_unused(host: str, port: int) -> None:
    """Raise if something listens at a port of this machine.

    A second coordinator could listen there, too, and the processes of two jobs would meet at the
    wrong one.

    Raises:
      ArgumentError: something does.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # The connections of a job that has ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(
                    f"Something listens at port {port} of {host} already, perhaps another job. "
                    f"Name another port, or none."
                ) from None


def answers(address: str) -> bool:
    """Whether something listens at ``host:port``."""
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except OSError:
        return False
    return True


def _resolved(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(
            f"The host {host!r:.100} is not known here: {error.strerror or error}."
        ) from None
    return str(found[0][4][0])


def _is_of_this_machine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
