"""`gpuflow gateway`: serves the HTTP API until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpuflow.cli.errors import DONE, Terminated, bad_input, interrupted

if TYPE_CHECKING:
    import uvicorn

    from gpuflow.gateway.certificates import Pair
    from gpuflow.settings import Settings

_BACKLOG: Final = 2048


@click.command(short_help="Serve the HTTP API.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="Port; 0: any free one.")
@click.option(
    "--max-file-bytes", type=click.IntRange(min=1), metavar="N", help="Largest file, over the setting (512 GiB)."
)
@click.option("--without-token", is_flag=True, help="On loopback: answer every program and user of this machine.")
@click.option(
    "--ssl-certfile", metavar="FILE", type=click.Path(path_type=Path), help="Certificate with its chain, PEM."
)
@click.option("--ssl-keyfile", metavar="FILE", type=click.Path(path_type=Path), help="Its key, PEM.")
@click.option("--ssl", "self_signed", is_flag=True, help="TLS with a self-signed certificate, for development.")
def gateway(
    host: str,
    port: int,
    max_file_bytes: int | None,
    without_token: bool,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    self_signed: bool,
) -> int:
    """Serve tasks, pipelines, results and /v1 over HTTP, until Ctrl-C.

    The token is GPUFLOW_WORKER_TOKEN, of 16 characters at least. Ctrl-C and SIGTERM let what comes in go on for
    GPUFLOW_GRACE_SEC; what is cut then can be gone on with.
    """
    from gpuflow.cli.output import line
    from gpuflow.cli.session import signals_interrupt
    from gpuflow.importing import load_checker
    from gpuflow.logs import dress
    from gpuflow.process_guard import guard_process
    from gpuflow.settings import Settings

    try:
        import cryptography  # noqa: F401
        import uvicorn

        from gpuflow.gateway.app import create_app
        from gpuflow.gateway.connections import MAX_HEADER_BYTES, Connections, allow_files, guarded
        from gpuflow.gateway.peers import Peers
    except ModuleNotFoundError as error:
        raise bad_input(f"the gateway needs {error.name}; install it with: pip install 'gpuflow[gateway]'") from None
    settings = Settings.load()
    guard_process(settings.umask_bits)
    if max_file_bytes is not None:
        settings = settings.model_copy(update={"gateway_max_file_bytes": max_file_bytes})
    family, address = _resolve(host, port)
    _check_token(settings, host, address[0], without_token=without_token)
    pair = _pair(settings, host, ssl_certfile, ssl_keyfile, self_signed=self_signed)
    _log_to_stderr(settings)
    table = Connections(
        most=allow_files(settings.gateway_max_connections),
        most_per_address=settings.gateway_max_connections_per_address,
        peers=Peers(settings.trusted_proxies),
    )
    with _listen(family, address) as listener:
        app = create_app(settings, open_here=without_token)
        config = uvicorn.Config(
            app,
            http=guarded(table),
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_level="debug" if settings.log_level == "DEBUG" else "warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=pair.certificate if pair else None,
            ssl_keyfile=pair.key if pair else None,
            timeout_graceful_shutdown=max(1, round(settings.grace_seconds)),
        )
        dress(settings.log_format, "gpuflow", "uvicorn", "uvicorn.error")
        load_checker()
        with signals_interrupt():
            try:
                line(f"gateway: {'https' if pair else 'http'}://{_shown(listener.getsockname())}")
                _server(config, app.state.api.stop, table.header_seconds).run(sockets=[listener])
            except Terminated as error:
                return interrupted(error)
            except KeyboardInterrupt:
                return DONE
    return DONE


def _check_token(settings: Settings, host: str, address: str, *, without_token: bool) -> None:
    """Refuse to serve whom nobody has let in. Raises bad input."""
    from gpuflow.gateway.login import weakness
    from gpuflow.gateway.peers import is_loopback

    token = settings.worker_token.get_secret_value() if settings.worker_token else ""
    if token or not without_token:
        mistake = weakness(token)
        if mistake:
            raise bad_input(mistake + ("" if token else "; or --without-token, for a machine with one user"))
    elif not is_loopback(address):
        raise bad_input(
            f"--host {host} lets other machines in, and there is no token; "
            "set GPUFLOW_WORKER_TOKEN, or listen on 127.0.0.1"
        )


def _log_to_stderr(settings: Settings) -> None:
    """Write the gateway's own lines, the access log among them, to stderr."""
    from gpuflow.logs import MaskingFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s")))
    logger = logging.getLogger("gpuflow")
    logger.addHandler(handler)
    logger.setLevel(settings.log_level)


def _pair(
    settings: Settings, host: str, certificate: Path | None, key: Path | None, *, self_signed: bool
) -> Pair | None:
    """Return the certificate to serve with, or None for plain HTTP. Raises click.UsageError, GPUFlowError."""
    from gpuflow.cli.output import note
    from gpuflow.gateway.certificates import development_pair, given_pair

    if (certificate is None) != (key is None):
        raise bad_input("--ssl-certfile and --ssl-keyfile go together; give both")
    if certificate is not None and key is not None:
        if self_signed:
            raise bad_input("--ssl makes a certificate, and --ssl-certfile names one; give one of them")
        return given_pair(certificate, key)
    if not self_signed:
        return None
    pair = development_pair(settings.state_dir / "tls", host)
    note(f"self-signed certificate: {pair.certificate}; clients trust it by SSL_CERT_FILE, or curl --cacert")
    return pair


def _server(config: uvicorn.Config, stop: Callable[[], None], tls_seconds: float) -> uvicorn.Server:
    """Return a server that calls `stop` when it begins to end, so that streams without an end do not hold it.

    `tls_seconds` is how long a connection has for its handshake, and for the end of its TLS: uvicorn leaves it a
    minute, in which no protocol is there that has a deadline.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])
            seconds = tls_seconds if config.ssl else None
            for listener in sockets or ():
                served = await asyncio.get_running_loop().create_server(
                    self._protocol,
                    sock=listener,
                    backlog=config.backlog,
                    ssl=config.ssl,
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=seconds,
                )
                self.servers.append(served)

        def _protocol(self) -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            stop()
            await super().shutdown(sockets)

    return Server(config)


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """Return the family and address to listen on. Raises GPUFlowError."""
    from gpuflow.errors import GPUFlowError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise GPUFlowError(f"--host {host} is no address of this machine: {error}; name another") from None
    return family, (str(address[0]), port)


def _listen(family: int, address: tuple[str, int]) -> socket.socket:
    """Return a listening socket, so that a taken port is one line and port 0 can be told. Raises GPUFlowError."""
    from gpuflow.errors import GPUFlowError

    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise GPUFlowError(
            f"the gateway cannot listen on {_shown(address)}: {error.strerror or error}; choose another --port"
        ) from None


def _shown(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
