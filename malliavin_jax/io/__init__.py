"""Recordings on disk: one `.npz` file, a folder of `.npy` files that may be larger than memory, or a recorder's folder.

The first two hold arrays of these names, as in `Recording`; nothing else, and nothing is ever unpickled:

    x                     (episodes, points, d)
    gradient              (episodes, points, d); may be absent: positions alone
    hessian               (episodes, points, d, d), or (episodes, points, d) for its diagonal; may be absent
    step_size             (), (episodes,), (points,) or (episodes, points); may be absent
    inverse_temperature   () or (episodes,); may be absent
    last_steps            (episodes,), the number of steps each episode made; may be absent: all rows count
    block_size            (), how many consecutive episodes may depend on each other; may be absent: 1

or, for one long log (see `split_log`), `x` and `gradient` of shape (rows, d), `hessian` of shape (rows, d, d) or
(rows, d), `step_size` also of shape (rows,), and

    starts                (episodes,), the row at which each episode starts, or (rows,) flags.

In a folder `x` is the file `x.npy`. Numbers may be of any real dtype; they are used in float32 if none is wider.

A `Recorder` writes one long log into a folder of its own, row by row, in files that are replaced whole:

    recorder.json         what every row holds: {"format": "malliavin_jax recorder", "version": 1, "dim": d, "gradient":
                          true or false, "hessian": "full", "diagonal" or null, "step_size": a number, "each" or null,
                          "inverse_temperature": a number or null}
    rows-000000004096.npz the rows from number 4096 on (counted from 0): arrays x (rows, d), gradient (rows, d), hessian
                          (rows, d, d) or (rows, d), step_size (rows,) where it is not the number above, and starts
                          (rows,), True at the first row of an episode

A file of rows is the last one, which may still grow, or ends where the next one begins; names that begin with a dot are
drafts and locks. So a reader finds whole rows at every moment, and those from row n on without reading the files before
them (`read_blocks`). Such a folder is loaded like any other recording.

A fitted field is kept in one `.npz` file (`save_field`, `load_field`): its arrays by number, and a header that says how
they go together, in the names of this package's own classes.
"""

from .blocks import RecordedRows as RecordedRows, read_blocks as read_blocks
from .fields import load_field as load_field, save_field as save_field
from .files import ARRAYS, MAX_BYTES, load as load, save as save  # noqa: F401
from .recorder import Recorder as Recorder
