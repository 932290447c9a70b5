"""Ray, where the pipeline asks for it: one connection of this process, shared by engines, grading and update workers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from tseeds.errors import StageFailed, UserError, first_line

logger = logging.getLogger(__name__)

_users = 0
_own = False


def connect(address: str | None, cpus: int) -> Any:
    """The ray module, connected to the cluster at ``address``, or to a local Ray of ``cpus`` cores that starts by itself.

    Every call needs a ``release``. Whoever comes first decides; a Ray that this program had joined before is used as it is.

    Raises:
        UserError: ray is not installed. StageFailed: no cluster answers at the address, or a local one does not start.
    """
    global _users, _own
    try:
        import ray
    except ImportError:
        raise UserError("engine.workers above 1 needs ray: install tseeds[ray], or set engine.workers = 1") from None
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        _hush(ray)
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        try:
            if address is not None:
                _reach(address)
                _with_token()
                ray.init(address=address, **options)
            else:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
        except (OSError, RuntimeError, ValueError) as error:
            if address is None:
                raise StageFailed(f"a local ray cannot be started: {first_line(error)}") from None
            raise StageFailed(
                f"engine.ray_address {address}: no Ray cluster that takes this machine answers there ({first_line(error)}); start "
                "one with ray start --head (with the same token: ray get-auth-token), or leave engine.ray_address out"
            ) from None
        _own = True
    _users += 1
    return ray


def _reach(address: str) -> None:
    """Ray itself tries for minutes to reach a host and port that do not answer.

    Raises:
        OSError: nothing answers there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _with_token() -> None:
    """Show the cluster this user's token where there is one: ray start asks for it then, and ray.init alone shows none."""
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:
        return
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def release() -> None:
    """Undo one ``connect``; the last one disconnects, and stops a local Ray."""
    global _users, _own
    _users -= 1
    if _users == 0 and _own:
        import ray

        ray.shutdown()
        _own = False


def started(ray: Any, actors: Sequence[Any], seconds: float, what: str, mend: str) -> None:
    """Wait until all actors (which have a method ``pid``) run.

    Raises:
        StageFailed: the cluster found no room for them within ``seconds``, or one died while it started.
    """
    waiting = [actor.pid.remote() for actor in actors]
    ready, missing = ray.wait(waiting, num_returns=len(waiting), timeout=seconds)
    if missing:
        free = {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
        raise StageFailed(
            f"the Ray cluster started {len(ready)} of {len(actors)} {what} within {seconds:g} s; it has {free['CPU']:g} CPUs "
            f"and {free['GPU']:g} GPUs free: {mend}"
        )
    try:
        ray.get(ready)
    except ray.exceptions.RayActorError as error:
        raise StageFailed(f"{what} died while they started: {first_line(error)}") from None


def places(ray: Any, number: int) -> list[tuple[str, int]]:
    """(node id, place on that node) for ``number`` processes: node by node, one for each GPU, or where there are none each CPU.

    More processes than that go round again.
    """
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeID"])
    kind = "GPU" if any(n["Resources"].get("GPU") for n in nodes) else "CPU"
    slots = [n["NodeID"] for n in nodes for _ in range(int(n["Resources"].get(kind, 0)))] or [nodes[0]["NodeID"]]
    taken: dict[str, int] = {}
    found = []
    for k in range(number):
        node = slots[k % len(slots)]
        found.append((node, taken.get(node, 0)))
        taken[node] = taken.get(node, 0) + 1
    return found


def on(ray: Any, node: str, *, soft: bool = False) -> Any:
    """Scheduling strategy: on that node; soft: elsewhere where it is gone."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=soft)


def cause(error: Any, what: str) -> Exception:
    """The exception that an actor's method raised, as it was."""
    found = error.cause
    if isinstance(found, UserError):
        return type(found)(*found.args)
    if isinstance(found, StageFailed):
        return StageFailed(f"{what} failed: {first_line(found)}")
    return StageFailed(f"{what} failed: {type(found).__name__}: {first_line(found)}")


def _hush(ray: Any) -> None:
    """Ray's notices go to the log; its raylet would otherwise print them on stdout, where --json results belong."""
    noisy = logging.getLogger("ray")
    noisy.addHandler(logging.NullHandler())
    noisy.setLevel(logging.ERROR)

    def to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logger.info("%s: %s", data["pid"], line)

    module: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(module, "print_to_stdstream"):
        module.print_to_stdstream = to_log
