# SPDX-License-Identifier: MIT
"""Types, plans and errors. This package imports no other part of cunorm."""
