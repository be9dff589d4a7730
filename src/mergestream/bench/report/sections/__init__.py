"""The report's sections, one file each: findings in, a Section out, or None where there is nothing to show."""
