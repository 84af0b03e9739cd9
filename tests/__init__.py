"""Tests. Whatever package of them is imported first, torch and BLAS are imported after this.

One thread of each, in these processes and those that they start, unless the environment says otherwise: threads that wait
for one another spin, and beside other busy processes the tiny models of the tests take ten times as long with two.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
