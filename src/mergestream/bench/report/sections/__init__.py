"""The report's sections, one file each: findings in, a PageSection out, or None if there is nothing to show."""
