# SPDX-License-Identifier: MIT
"""Tables and pictures from the committed CSVs."""
