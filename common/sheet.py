"""Contact sheets: rows of pictures with a line of text beside each row and above each column."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont


def contact_sheet(
    rows: Sequence[Sequence[Image.Image]],
    labels: Sequence[str] = (),
    titles: Sequence[str] = (),
    cell: int = 128,
    gap: int = 6,
) -> Image.Image:
    """Pictures scaled to `cell` pixels without smoothing; labels left of the rows, titles above the columns."""
    font = ImageFont.load_default(size=13)
    widths = [int(font.getlength(line)) for text in labels for line in text.split("\n")]
    margin = gap + (max(widths) + gap if widths else 0)
    head = 18 if titles else 0
    columns = max(len(row) for row in rows)
    sheet = Image.new("RGB", (margin + columns * (cell + gap), head + len(rows) * (cell + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for x, title in enumerate(titles):
        text = title
        while font.getlength(text) > cell:
            text = text.removesuffix("…")[:-1] + "…"
        draw.text((margin + x * (cell + gap), 4), text, fill="black", font=font)
    for y, row in enumerate(rows):
        top = head + gap + y * (cell + gap)
        if y < len(labels):
            draw.multiline_text((gap, top + 4), labels[y], fill="black", font=font, spacing=4)
        for x, picture in enumerate(row):
            sheet.paste(picture.resize((cell, cell), Image.Resampling.NEAREST), (margin + x * (cell + gap), top))
    return sheet
