"""The ZeRO paper's own table, as printed there, against its formula."""

import pytest
from vramlab.report.errors import RecipeError
from vramlab_course.zero_paper import SIZES, WORLDS, model_states

# Rajbhandari et al. 2020, table 1: GB (10⁹ bytes) on one device, for stages 1, 2 and 3.
PRINTED = {
    "7.5B": [
        (120, 120, 120),
        (52.5, 41.3, 30),
        (35.6, 21.6, 7.5),
        (31.4, 16.6, 1.88),
        (30.4, 15.4, 0.47),
        (30.1, 15.1, 0.12),
    ],
    "128B": [(2048, 2048, 2048), (896, 704, 512), (608, 368, 128), (536, 284, 32), (518, 263, 8), (513, 257, 2)],
    "1T": [
        (16000, 16000, 16000),
        (7000, 5500, 4000),
        (4750, 2875, 1000),
        (4187, 2218, 250),
        (4046, 2054, 62.5),
        (4011, 2013, 15.6),
    ],
}


@pytest.mark.parametrize("name", SIZES)
def test_reproduces_the_table(name):
    for world_size, printed in zip(WORLDS, PRINTED[name], strict=True):
        for stage, figure in zip((1, 2, 3), printed, strict=True):
            ours = model_states(SIZES[name], world_size, stage) / 1e9
            last_digit = 1 if float(figure).is_integer() else 0.1 if round(figure, 1) == figure else 0.01
            assert ours == pytest.approx(figure, abs=last_digit)  # the paper rounds some figures and cuts others
    assert model_states(SIZES[name], 8, 0) == 16 * SIZES[name]


def test_table_2_in_theory():
    # table 2, 64 GPUs of 32 GB, no model parallelism: 2 B, 7.6 B, 14.4 B and 128 B parameters
    found = [32 / model_states(1.0, 64, stage) for stage in range(4)]
    assert found == pytest.approx([2, 7.6, 14.4, 128], abs=0.1)


def test_wrong_questions():
    with pytest.raises(RecipeError, match="stage"):
        model_states(1e9, 4, 4)
    with pytest.raises(RecipeError, match="world_size"):
        model_states(1e9, 0, 1)
