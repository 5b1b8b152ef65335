"""The database of a study's trials: Optuna's storage, which waits while its server is gone."""

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fusedgpt.errors import UserError, first_line, shown

HEARTBEAT_S = 15  # seconds between heartbeats of a worker
PATIENCE_S = 120  # seconds to wait for a database that is gone
GRACE_S = 180  # seconds without a heartbeat until a trial is queued again; longer than a worker is patient
AT_ONCE = 5  # times to try to create tables that another worker may be creating too
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql"}  # those that pip installs without a compiler
# a server that has lost its power says nothing: give up a connection after seconds, and its silence after milliseconds
TIMEOUTS = {"postgresql": {"connect_timeout": 10, "tcp_user_timeout": 30_000}, "sqlite": {"timeout": 60}}


def libraries(storage: str | None = None) -> Any:
    """The package optuna. Raises UserError if it is missing, or the driver of the database `storage`."""
    try:
        import optuna
    except ImportError as error:
        why = "--search" if storage is None else "--storage"
        raise UserError(f"{why} needs Optuna: pip install 'optuna>=4.9'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def connect(url: str, say: Callable[[str], None]) -> tuple[Any, str]:
    """Optuna's storage at `url`, and the place without a password. Raises UserError if it cannot be opened."""
    import sqlalchemy
    from sqlalchemy import exc

    try:
        parsed = sqlalchemy.make_url(url)
        if parsed.drivername in DRIVERS:
            parsed = parsed.set(drivername=f"{parsed.drivername}+{DRIVERS[parsed.drivername]}")
        place = parsed.render_as_string(hide_password=True)
        storage = _storage(parsed, say)
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        raise UserError(
            f"--storage={shown(without_password(url))} is no database: write postgresql://user@host/db,"
            " mysql://user@host/db or sqlite:///file.db"
        ) from error
    except ImportError as error:
        raise UserError(
            f"{place} needs a driver: pip install 'psycopg[binary]' for PostgreSQL, pymysql for MySQL"
        ) from error
    except (exc.SQLAlchemyError, RuntimeError) as error:
        raise UserError(
            f"cannot open the storage {place}: {first_line(getattr(error, 'orig', None) or error)}"
        ) from error
    return storage, place


def _storage(url, say):
    import optuna
    import sqlalchemy
    from sqlalchemy import exc

    kind = url.get_backend_name()
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    how = dict(engine_kwargs={"pool_pre_ping": True, "connect_args": TIMEOUTS.get(kind, {})})
    how |= dict(heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S, heartbeat_stale_trial_callback=queue_again)
    for left in reversed(range(AT_ONCE)):
        try:
            storage = optuna.storages.RDBStorage(text, **how)
            break
        except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError) as error:
            if not left or (isinstance(error, exc.OperationalError) and "already exists" not in str(error)):
                raise
            time.sleep(random.random())  # another worker has begun to create the tables
    if kind == "sqlite":
        _keep_apart(storage.engine)
    else:
        sqlalchemy.event.listen(storage.engine, "do_connect", Patience(say).connect)
    return storage


def _keep_apart(engine):
    """Have SQLite lock the file from a transaction's first read on. Otherwise two workers could take one trial."""
    import sqlalchemy

    sqlalchemy.event.listen(engine, "connect", lambda connection, record: setattr(connection, "isolation_level", None))
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # the connections from before


@contextlib.contextmanager
def heartbeat(storage: Any, study: str, number: int) -> Iterator[None]:
    """Let a thread tell, while the body runs, that the worker with the trial `number` of a study lives."""
    import optuna
    from sqlalchemy import exc

    trial = storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(study), number)
    ended = threading.Event()

    def beat():
        while not ended.wait(HEARTBEAT_S):
            with contextlib.suppress(UserError, exc.SQLAlchemyError, optuna.exceptions.StorageInternalError):
                storage.record_heartbeat(trial)  # one that is missed does no harm

    storage.record_heartbeat(trial)
    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Patience:
    """Opens connections, and waits while the server is gone. Once it was in vain, it waits no more."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.said, self.in_vain = say, False, False

    def connect(self, dialect: Any, record: Any, args: Any, kwargs: Any) -> Any:
        """A connection, as SQLAlchemy's event do_connect asks for it. Raises UserError if the server stays away."""
        began = time.monotonic()
        while True:
            try:
                connection = dialect.connect(*args, **kwargs)
                self.said = False
                return connection
            except dialect.loaded_dbapi.OperationalError as error:
                if self.in_vain or time.monotonic() - began > PATIENCE_S:
                    self.in_vain = True
                    raise UserError(
                        f"the database has been gone for {PATIENCE_S} s ({first_line(error)}). Runs have saved, and"
                        " nothing is lost: give the same command once it is back"
                    ) from error
                if not self.said:
                    self.say(f"the database is gone ({first_line(error)}): waiting for it; runs go on")
                self.said = True
                time.sleep(1)


def queue_again(study: Any, trial: Any) -> None:
    """Queue a trial that broke off once more, with the settings that it had. `trial`: Optuna's FrozenTrial."""
    values = trial.system_attrs.get("fixed_params", {}) | trial.params
    variant = {name: trial.user_attrs[name] for name in ("variant",) if name in trial.user_attrs}
    study.enqueue_trial(values, user_attrs=variant)


def without_password(text: str) -> str:
    """`text`, such as a command line, with the password of each URL hidden."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", text)
