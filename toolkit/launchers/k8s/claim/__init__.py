"""Files of a run directory on the claim, which the machine that submits does not see."""

from toolkit.launchers.k8s.claim.files import Files
from toolkit.launchers.k8s.claim.reading import fetch, read_file
from toolkit.launchers.k8s.claim.transfers import placed, transfer

__all__ = ["Files", "fetch", "placed", "read_file", "transfer"]
