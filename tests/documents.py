"""A small document, written byte by byte, so that no package that reads it has written it."""


def pdf(pages):
    """A PDF with a line of text on each page; a page of None has none."""
    first = 4  # the number of the first object that is of a page
    kids = " ".join(f"{first + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for n, text in enumerate(pages):
        at = first + 2 * n
        content = "" if text is None else f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents {at + 1} 0 R>>",
            f"<</Length {len(content)}>>stream\n{content}\nendstream",
        ]
    raw, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(raw))
        raw += f"{number} 0 obj\n{each}\nendobj\n".encode("cp1252")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer<</Size {len(objects) + 1}/Root 1 0 R>>\n"
    return raw + f"{end}startxref\n{len(raw)}\n%%EOF\n".encode()
