"""The name `train` for `toolkit_train`, so that commands and job files are those of a checkout.

`toolkit_train.pth` puts the folder of this package last into Python's path: any other module or
package `train` is found first. A folder `train` without `__init__.py`, which Python would take only
if there were nothing else, is searched before ours.
"""

import os.path
import sys
from pathlib import Path

_ALIAS = Path(__file__).parent
_FOLDERS = [Path(entry, __name__) for entry in sys.path]
# Not Path.is_dir(), which raises an error below a folder that this user may not enter.
_OTHERS = [f for f in _FOLDERS if os.path.isdir(f) and f != _ALIAS]  # noqa: PTH112
__path__ = [*map(str, _OTHERS), str(_ALIAS.parents[1])]
