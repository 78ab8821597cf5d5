"""The kernel with gcc's checks of memory and arithmetic compiled in, each of which ends the process."""

import pytest

from tests.support.sanitized import run

# Each function and layout once: the kernel is also tried when it is loaded. All cases: make sanitize.
CASES = "(update_equals and 0.9-0.3) or adamw_of or view_takes or sign_to_be_turned or squared_distance_over"


def finished(*arguments):
    done = run(*arguments, capture_output=True, text=True)
    if isinstance(done, str):
        pytest.skip(done)
    return done


@pytest.mark.slow
def test_tests_of_the_kernel_find_no_fault_of_memory_or_arithmetic():
    done = finished(
        "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/tensors/test_kernel.py", "-k", CASES
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"), [("memory", "AddressSanitizer"), ("arithmetic", "signed integer overflow")]
)
def test_a_fault_ends_the_process(kind, words):
    done = finished("--fault", kind)
    assert done.returncode != 0
    assert words in done.stderr
