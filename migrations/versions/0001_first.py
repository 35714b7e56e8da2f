"""
The tables, types, functions and views of pgreaper 0.1.
"""

from alembic.operations import Operations

from pgreaper import schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FILES: tuple[str, ...] = ()

# Dead letters and active leases are work that only these tables know of.  The
# locks keep a worker from leasing more between this look and the drop.
UNFINISHED = """\
do $unfinished$
declare
  v_dead bigint;
  v_leases bigint;
begin
  lock table pgreaper.claims, pgreaper.failures in access exclusive mode;

  select count(*) into v_dead from pgreaper.failures as f where f.not_before = 'infinity';
  select count(*) into v_leases from pgreaper.claims as c where c.finished_at is null;

  if v_dead + v_leases > 0 then
    raise exception 'pgreaper has unfinished work: % dead letters, % active leases', v_dead, v_leases
      using errcode = 'object_in_use',
            hint = 'Nothing was changed. Stop the workers and settle the dead letters, or use --force and lose the record of both.';
  end if;
end
$unfinished$;
"""


def upgrade(op: Operations) -> None:
    schema.apply(op, revision, FILES)


def downgrade(op: Operations) -> None:
    if not op.get_context().opts.get("pgreaper_force"):
        schema.execute(op, UNFINISHED)
    schema.drop(op, revision, FILES)
