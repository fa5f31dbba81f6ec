"""Java for programs that run for seconds: it compiles little and collects garbage in one thread."""

from __future__ import annotations

QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Of Spark's scripts: for the program that puts a command line together, and for the driver.
ENVIRONMENT = {"SPARK_LAUNCHER_OPTS": QUICK_JAVA, "SPARK_SUBMIT_OPTS": QUICK_JAVA}
