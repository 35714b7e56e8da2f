"""
How pgreaper finds and opens its database.

Owns the order in which settings are looked up, the defaults that keep a dead
network from hanging a worker, and the promise that no password is ever repeated.
Sends no startup ``options`` of its own and sets nothing on a session: poolers refuse
the one and leak the other.  Settings that the user asks for with ``options`` and that a
pooler keeps back are made good transaction by transaction (:attr:`Connection.local_settings`).
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgreaper import lookup
from pgreaper.errors import DatabaseUnavailable, InvalidInput
from pgreaper.statement import qualified
from pgreaper.text import one_line

# A lost network is noticed within a lease of the default length (one minute).
# Unix sockets ignore all of these but the first.
_DEFAULTS: Final = {
    "connect_timeout": ("10", "PGCONNECT_TIMEOUT"),
    "keepalives": ("1", None),
    "keepalives_idle": ("20", None),
    "keepalives_interval": ("5", None),
    "keepalives_count": ("4", None),
    "tcp_user_timeout": ("45000", None),
    "client_encoding": ("UTF8", None),
}
_DRIVER_SCHEME = re.compile(r"^postgres(?:ql)?(?:\+\w+)?://", re.IGNORECASE)
# Servers and poolers that are there but have no place for us, or not yet.  Compiled when an error comes.
_FULL: Final = (
    r"(?i)too many (?:clients|connections)|connection slots|no more connections|starting up|shutting down|recovery"
)
_REFUSED: Final = r"unsupported startup parameter(?: in (options))?: ?(\w+)"
# Seconds that a name's lookup may take where no connect_timeout is in force.
_LOOKUP_LIMIT: Final = 60.0
# Parameters that are, or lead to, a secret; and libpq's variables for them.
_SECRETS: Final = ("password", "sslpassword", "passfile", "oauth_client_secret", "scram_client_key", "scram_server_key")
_SECRET_VARIABLES: Final = ("PGPASSWORD", "PGPASSFILE")
OPTION: Final = "--database-url"
VARIABLES: Final = ("PGREAPER_DATABASE_URL", "DATABASE_URL")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the database is: libpq parameters, and what told us so."""

    parameters: dict[str, str]
    source: str

    def __repr__(self) -> str:
        return f"Address({self.source})"

    def conceal(self, text: str) -> str:
        """The text without passwords, where they are kept, and the values of ``options``, which libpq may echo."""
        secrets = [self.parameters.get(name) for name in _SECRETS] + [
            os.environ.get(name) for name in _SECRET_VARIABLES
        ]
        # In quotes, as the server repeats them: a value may be as short as 1.
        for options in (self.parameters.get("options"), os.environ.get("PGOPTIONS")):
            secrets += [f'"{value}"' for word in _words(options or "") if (value := word.partition("=")[2])]
        for secret in sorted({secret for secret in secrets if secret}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def worker_name() -> str:
    """``pgreaper/<host>/<pid>``, at most 63 bytes; of a long host the end is kept, where pod names differ."""
    end = f"/{os.getpid()}"
    host = socket.gethostname().encode("ascii", "replace").decode()
    return "pgreaper/" + host[-(63 - len("pgreaper/") - len(end)) :] + end


def resolve(url: str | None = None) -> Address:
    """
    Find the address: the argument, PGREAPER_DATABASE_URL, DATABASE_URL, libpq's own settings.

    Raises InvalidInput, without repeating the text, when it is not a connection string.
    """
    source = OPTION
    if not url:
        for variable in VARIABLES:
            if url := os.environ.get(variable):
                source = variable
                break
        else:
            url, source = "", "libpq's settings"
    return Address(_parse(url.strip(), source), source)


def _parse(url: str, source: str) -> dict[str, str]:
    if scheme := _DRIVER_SCHEME.match(url):
        url = "postgresql://" + url[scheme.end() :]
        _refuse_unescaped(url, source)
    elif "://" in url.partition("?")[0] and "=" not in url.partition("://")[0]:
        raise InvalidInput(
            f"{source} is not a Postgres URL",
            hint="It begins with postgresql://, postgres:// or postgresql+psycopg://.",
        )
    try:
        parameters = {k: str(v) for k, v in conninfo_to_dict(url).items() if v is not None}
    except psycopg.Error:
        # libpq's message quotes the part that it could not read: maybe the password.
        raise InvalidInput(f"{source} is not a connection string that libpq understands", hint=_suspect(url)) from None
    if any(port and not port.isdigit() for port in parameters.get("port", "").split(",")):
        raise InvalidInput(f"the port in {source} is not a number", hint=_ESCAPE_HINT)
    return parameters


_ESCAPE_HINT = "In the password of a URL, write @ as %40, / as %2F, : as %3A, # as %23, ? as %3F and % as %25."


def _refuse_unescaped(url: str, source: str) -> None:
    """Refuse a URL whose password libpq would cut in two: the rest would be shown as a host name."""
    rest = url.partition("://")[2]
    authority, _, path = rest.partition("?")[0].partition("/")
    if authority.count("@") > 1 or "@" in path:
        raise InvalidInput(
            f"the URL in {source} has a character in its password that must be escaped", hint=_ESCAPE_HINT
        )


def _suspect(url: str) -> str:
    """What may be wrong with a connection string, by names only."""
    known = {d.keyword.decode() for d in psycopg.pq.Conninfo.get_defaults()} | {"ssl"}
    names = [pair.partition("=")[0] for pair in url.partition("?")[2].split("&") if "=" in pair]
    unknown = [one_line(name) for name in names if name not in known and name.isidentifier()]
    if url.startswith("postgresql://") and unknown:
        return f"libpq has no parameter {', '.join(unknown)}: leave it out."
    return _ESCAPE_HINT if "://" in url else "Example: postgresql://user@host:5432/name, or host=… dbname=…."


class Connection(psycopg.Connection[tuple[object, ...]]):
    """
    A connection of pgreaper's own.

    ``local_settings`` are those of the address's ``options`` that are not in force on the
    server, because a pooler ignores or refuses ``options``: whoever begins a transaction
    sets them in it.  On a direct connection there are none.
    """

    local_settings: Mapping[str, str] = {}


def connect(address: Address, *, name: str | None = None) -> Connection:
    """
    Open a connection in autocommit, without prepared statements.

    Raises DatabaseUnavailable; its ``waiting`` tells that a server is there and only has no place yet.
    Raises InvalidInput when the address has ``options`` that a pooler keeps back and that cannot be made good.
    """
    parameters: dict[str, str] = {"fallback_application_name": name or worker_name()}
    for keyword, (value, variable) in _DEFAULTS.items():
        if not (variable and os.environ.get(variable)):
            parameters[keyword] = value
    parameters.update(address.parameters)
    parameters |= _looked_up(address, parameters)
    options = address.parameters.get("options", os.environ.get("PGOPTIONS", ""))
    try:
        connection = _open(address, parameters)
    except Unreachable as refused:
        if not options.strip() or refused.parameter != "options":
            raise
        connection = _open(address, parameters | {"options": ""})
    if options.strip():
        try:
            connection.local_settings = _not_in_force(connection, _settings(options))
        except BaseException:
            connection.close()
            raise
    return connection


def _looked_up(address: Address, parameters: Mapping[str, str]) -> dict[str, str]:
    """The host's name and its addresses, looked up where a signal can interrupt it."""
    limit = parameters.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT") or ""
    try:
        return lookup.addresses(parameters, float(limit) if limit.isdigit() and int(limit) > 0 else _LOOKUP_LIMIT)
    except lookup.NotResolved as error:
        trouble = one_line(address.conceal(str(error)))
    raise Unreachable(f"the database cannot be reached: {trouble}", hint=_advice(address), waiting=False)


def _open(address: Address, parameters: dict[str, str]) -> Connection:
    try:
        return Connection.connect("", autocommit=True, prepare_threshold=None, **parameters)  # type: ignore[arg-type]
    except psycopg.Error as error:
        text = address.conceal(str(error))
    # Outside the handler: the text that libpq wrote stays in nobody's traceback.
    refused = refused_parameter(text)
    raise Unreachable(
        f"the database cannot be reached: {_first_sentence(text)}",
        hint="The pooler takes no such parameter: leave it out of the URL and of the PG… variables, "
        "or list it in the pooler's ignore_startup_parameters."
        if refused
        else _advice(address),
        waiting=re.search(_FULL, text) is not None,
        parameter=refused,
    )


def refused_parameter(text: str) -> str | None:
    """The startup parameter that a pooler refuses in these words; newer ones name the part of ``options``."""
    found = re.search(_REFUSED, text)
    return (found[1] or found[2]) if found else None


def _words(options: str) -> list[str]:
    """The words of ``options``; a backslash keeps a blank in one."""
    return [re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|[^\s\\])+", options)]


def _settings(options: str) -> dict[str, str]:
    """The settings that ``options`` gives as ``-c name=value`` or ``--name=value``, split as the server splits it."""
    words = _words(options)
    found = {}
    while words:
        word = words.pop(0)
        if word == "-c" and words:
            word = "-c" + words.pop(0)
        name, equals, value = word.removeprefix("--" if word.startswith("--") else "-c").partition("=")
        if not word.startswith(("--", "-c")) or not equals:
            raise InvalidInput(
                "options of the connection has more than settings in it",
                hint="Write it as -c name=value; nothing else can pass a pooler.",
            )
        found[name.replace("-", "_")] = value
    return found


def _not_in_force(connection: Connection, wanted: Mapping[str, str]) -> dict[str, str]:
    """Which of these settings the server does not have, as a statement of the worker would find them."""
    names = list(wanted)
    try:
        # Two statements: what set_config changes must not be what current_setting reads.
        there = connection.execute(
            qualified("select n.name, current_setting(n.name, true) from unnest(%s::text[]) as n (name)"), [names]
        ).fetchall()
        asked = connection.execute(
            # unnest() with several arguments is grammar: the server's own, and takes no schema.
            "select n.name, pg_catalog.set_config(n.name, n.value, true)"
            " from unnest(%s::pg_catalog.text[], %s::pg_catalog.text[]) as n (name, value)",
            [names, list(wanted.values())],
        ).fetchall()
    except psycopg.OperationalError:
        raise DatabaseUnavailable("the connection to the database is lost", hint="Try again later.") from None
    except psycopg.Error:
        raise InvalidInput(
            f"a pooler keeps back the connection's options, and {', '.join(names)} cannot be set in its place",
            hint="Give the setting to the role: alter role … set … = …",
        ) from None
    before = {str(name): value for name, value in there}
    return {str(name): wanted[str(name)] for name, value in asked if before.get(str(name)) != value}


class Unreachable(DatabaseUnavailable):
    """
    No connection came about.

    ``waiting``: the server answered, it only has no place yet.  ``parameter``: the startup parameter
    that a pooler refuses.
    """

    def __init__(self, message: str, *, hint: str, waiting: bool, parameter: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.waiting = waiting
        self.parameter = parameter


def _first_sentence(text: str) -> str:
    """libpq's message on one line, one part a host, without its advice and without what we say already."""
    # Advice is indented, or a sentence of its own.
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith(("\t", " ", "Either "))]
    if any(line.startswith("Multiple connection attempts") for line in lines):
        lines = [re.sub(r"^- .*?': (?=connection |failed )", "", line) for line in lines if line.startswith("- ")]
    parts = [line.removeprefix("connection failed: ").removeprefix("connection is bad: ").rstrip(".") for line in lines]
    parts = list(dict.fromkeys(parts))
    more = f"; and {len(parts) - 3} more" if len(parts) > 3 else ""
    return one_line(" ".join("; ".join(parts[:3]).split())) + more


def _advice(address: Address) -> str:
    if address.source in VARIABLES or address.source == OPTION:
        return f"The address came from {address.source}."
    if any(name in os.environ for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE", "PGPORT")):
        return "The address came from libpq's PG… variables."
    return f"No database was named: set {VARIABLES[0]} or DATABASE_URL, or give {OPTION}."
