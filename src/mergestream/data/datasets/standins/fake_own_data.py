"""Stand-ins of a user's own data."""

from pathlib import Path

from mergestream.data.datasets.standins.drawing import picture, write_picture

CLASSES, SITES = ("benign", "malignant", "normal"), ("brest", "lyon", "turin")


def write_folder(folder: Path) -> None:
    for site in SITES:
        for label, name in enumerate(CLASSES):
            for number in range(6):
                ending = (".png", ".jpg", ".webp", ".bmp", ".tiff", ".png")[number]
                write_picture(folder / site / name / f"{number}{ending}", picture(site, label, number))


def write_table(folder: Path) -> None:
    """Two images per patient, a time of acquisition, and the scanner as a subgroup."""
    lines = ["image,label,domain,group,acquired,scanner"]
    for site in SITES:
        for label, name in enumerate(CLASSES):
            for number in range(6):
                image = f"images/{site}_{name}_{number}.png"
                write_picture(folder / image, picture(site, label, number))
                time = f"2025-03-{10 + number:02d}T{8 + label:02d}:30"
                scanner = "A" if number % 2 else "B"
                lines.append(f"{image},{name},{site},{site}-{label}-{number // 2},{time},{scanner}")
    (folder / "samples.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
