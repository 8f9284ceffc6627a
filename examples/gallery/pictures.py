"""What the pictures of the gallery share."""

from pathlib import Path

from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images" / "gallery"
# Colours of Okabe and Ito, which readers with every kind of colour vision can tell apart.
RED, BLUE, GREEN, AMBER, SKY, GREY = "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#8C8C8C"


def save(figure: Figure, name: str) -> None:
    """Write the picture of a page."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=130)
    print(f"Picture in {IMAGES / f'{name}.png'}")
