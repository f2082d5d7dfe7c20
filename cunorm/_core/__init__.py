# SPDX-License-Identifier: MIT
"""Types, plans and errors; imports nothing of ours outside it."""
