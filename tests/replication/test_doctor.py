"""What the doctor finds where there are two servers: a standby, and a slot that a standby has left behind."""

from __future__ import annotations

from pgreaper.doctor import examine
from tests.replication.conftest import Standby, connect, until


def test_the_standby_of_a_primary(pair):
    """A look works there and says that nothing can be expired; on the primary nothing is found."""
    primary, standby = pair
    with connect(standby) as connection:
        assert [f.code for f in examine(connection).findings if f.level != "note"] == ["standby"]
    with connect(primary) as connection:
        assert [f.code for f in examine(connection).findings if f.level != "note"] == []


def test_c086_a_slot_that_nobody_reads_from(pair):
    """Its standby is gone and had asked the primary to keep what it reads."""
    primary, _ = pair
    with connect(primary) as db:
        db.execute("select pg_create_physical_replication_slot('left_behind')")
        with Standby(primary) as standby:
            with connect(standby) as replica:
                replica.execute("alter system set primary_slot_name = 'left_behind'")
                replica.execute("alter system set hot_standby_feedback = on")
                replica.execute("alter system set wal_receiver_status_interval = '1s'")
                replica.execute("select pg_reload_conf()")
            until(db, "select xmin is not null from pg_replication_slots where slot_name = 'left_behind'")
            assert [f.code for f in examine(db).findings if f.level != "note"] == []
            standby.kill()
            until(db, "select not active from pg_replication_slots where slot_name = 'left_behind'")
        [finding] = [f for f in examine(db).findings if f.code == "replication-slot"]
        assert (finding.subject, finding.level) == ("left_behind", "warning")
        db.execute(finding.sql[0])
        assert [f.code for f in examine(db).findings if f.code == "replication-slot"] == []
