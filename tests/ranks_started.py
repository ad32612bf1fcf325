"""What the server of the tests' ranks loads last: it looks at the names of all modules, once.

Garbage is then collected without a look at what is loaded, here and in the ranks.
"""

import gc

from warm_ranks import NAMES

NAMES.watch()
gc.collect()
gc.freeze()
