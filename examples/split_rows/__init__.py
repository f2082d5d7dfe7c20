# SPDX-License-Identifier: MIT
"""An attention whose heads are split over processes or devices, and the report of its errors."""
