"""The theory needs numpy and scipy, and nothing of torch."""

import subprocess
import sys

PROGRAM = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning_fabric", "matplotlib", "rich"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, NoTorch())
import curvestep
import curvestep.theory as theory

guarantee = theory.theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-4, version="sharp")
assert theory.certify(theory.Quartic(), guarantee, 30.0).status == "holds"
assert curvestep.theory is theory
assert "torch" not in sys.modules
print("imported", len([name for name in dir(theory) if not name.startswith("_")]))
"""


def test_theory_works_where_torch_cannot_be_imported():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("imported")
