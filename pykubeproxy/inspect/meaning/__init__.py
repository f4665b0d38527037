"""What rules mean to packets, whatever their form: the comparison behind `pykubeproxy diff --meaning`."""
