"""The checks behind `pykubeproxy check`: findings from facts, each with advice."""
