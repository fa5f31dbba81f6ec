"""Connecting to a Ray cluster: join the given one, or start one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from recmill.errors import MissingPackage, RecmillError, ResourceError, first_line
from recmill.reporting.machine import available_cores


@contextmanager
def connected(
    address: str | None,
    num_cpus: int | None = None,
    variables: Mapping[str, str] | None = None,
    **starting: Any,
) -> Iterator[None]:
    """Join the cluster at an address or in RAY_ADDRESS; without either, start one that ends with this context.

    An existing connection of the program is reused and left open. `variables` are for the environment of its
    processes, `num_cpus` and `starting` for a cluster that is started.
    """
    try:
        import ray
    except ImportError:
        raise MissingPackage('Engine "ray"', "ray", "ray") from None
    if ray.is_initialized():
        if address is not None:
            raise RecmillError(
                f"This program is connected to a Ray cluster already; leave out the address ({address}) to use it."
            )
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "local"):
        _start(num_cpus or available_cores(), variables or {}, starting)
    else:
        _join(address, variables or {})
    try:
        yield
    finally:
        ray.shutdown()


def _start(num_cpus: int, variables: Mapping[str, str], starting: Mapping[str, Any]) -> None:
    with _environment(num_cpus, variables):
        try:
            _init("local", num_cpus=num_cpus, **starting)
        except OSError as error:
            raise ResourceError(
                f"Ray cannot start on this machine: {first_line(error)}. "
                "Set RAY_TMPDIR to a folder that you may write to and whose path is short."
            ) from None


def _join(address: str, variables: Mapping[str, str]) -> None:
    _check_answers(address)
    _init(address, **({"runtime_env": {"env_vars": dict(variables)}} if variables else {}))
    _check_machines()


def _init(address: str, **options: Any) -> None:
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _nobody_answers(address, error) from None


def _check_answers(address: str) -> None:
    """Fail fast: Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise _nobody_answers(address, error) from None


def _nobody_answers(address: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"No Ray cluster answers at {address}: {first_line(error)}. "
        "Start one with `ray start --head`, give its address as --address HOST:PORT, or leave --address out."
    )


def _check_machines() -> None:
    """Fail fast: Ray would retry for ever on a machine that cannot import a function."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(_version)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in alive
    }
    for address, answer in asked.items():
        try:
            found = ray.get(answer)
        except ray.exceptions.RayError as error:
            found = f"an error: {first_line(error)}"
        if found != _version():
            raise RecmillError(
                f"Machine {address} of the Ray cluster answers {found}; expected {_version()}. "
                "Install the same recmill on all machines."
            )


def _version() -> str:
    import recmill

    return f"recmill {recmill.__version__}"


@contextmanager
def _environment(num_cpus: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that the processes of a cluster started here inherit, unless they are set already."""
    wanted = {
        **variables,
        "RAY_USAGE_STATS_ENABLED": "0",
        # A shuffle uses processes of its own; without these, idle ones end after a second and are restarted.
        "RAY_num_workers_soft_limit": str(3 * num_cpus),
        "RAY_idle_worker_killing_time_threshold_ms": "60000",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
