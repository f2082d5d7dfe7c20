# SPDX-License-Identifier: MIT
"""The plans of calls on a GPU, judged without a GPU: SASS, occupancy, bytes, predicted times."""
