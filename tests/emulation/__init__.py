# SPDX-License-Identifier: MIT
"""Launch plans, thread orders, races, bytes and bits of kernels, on the software GPU."""
