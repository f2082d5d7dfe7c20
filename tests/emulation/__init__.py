# SPDX-License-Identifier: MIT
"""Launch plans, orders, races, bytes, bits and mutants of the kernels, on the software GPU."""
