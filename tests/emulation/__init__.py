# SPDX-License-Identifier: MIT
"""Launch plans, thread orders, races, bytes, bits and mutants of kernels, on the software GPU."""
