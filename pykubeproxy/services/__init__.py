"""From objects to who serves whom: service ports, endpoints, and the reason for each that is left out.

Pure: no clock, no environment, no logging; what it decides it returns.
"""
