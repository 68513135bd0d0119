"""A report holds 20 000 records: the size of each record in it is bounded."""

from tests.harness.reach import FAILING, many_records, measure

FEW, MORE = 100, 200
MOST = 15e6 / 20_000
"""Bytes of the page a record: 15 MB for 20 000."""


def test_the_records_are_distinct_and_the_same_every_time():
    records = list(many_records(1000))
    assert len({record["case"] for record in records}) == 1000
    assert sum(record["verdict"] == "fail" for record in records) == 1000 // FAILING
    assert records[:50] == list(many_records(50))


def test_the_page_grows_by_less_than_750_bytes_a_record(tmp_path):
    """A tenth of the records fail, each with its findings."""
    sizes = []
    for count in (FEW, MORE):
        steps = {name: path for name, _, path in measure(count, tmp_path / str(count))}
        assert {"journal", "report and tables", "gate"} <= set(steps)
        sizes.append(steps["report and tables"].stat().st_size)
    assert 0 < sizes[1] - sizes[0] < MOST * (MORE - FEW)
