"""Each erratum of the paper: its counterexample contradicts what is printed, its correction holds."""

import pytest

from curvestep_reproduction.claims.errata import ERRATA


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda erratum: erratum.name)
def test_a_counterexample_contradicts_the_paper_and_a_correction_holds(erratum):
    assert erratum.counterexample().holds
    assert erratum.certificate().holds
