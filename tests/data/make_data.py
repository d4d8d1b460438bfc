"""Writes the sample documents and broken files that an editor cannot: compressed, Parquet, UTF-16, cut or mixed up.

    python tests/data/make_data.py

The plain ones beside them were written by hand. All texts were written for this project.
"""

from __future__ import annotations

import bz2
import codecs
import datetime
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

HERE = Path(__file__).parent

MINUTES = [
    ("2024-01-16", "en", 9, "The board met in the reading room because the heating in the hall had failed. Agreed to order two tonnes of pellets at once and to settle the question of the boiler in March. The secretary pointed out that the same sentence stands in last year's minutes."),
    ("2024-02-20", "de", 7, "Der Kassenbericht wurde verlesen und ohne Gegenstimme angenommen. Für die Reparatur des Daches liegen drei Angebote vor; das mittlere enthält auch die Rinne und wird angenommen. Herr Öztürk übernimmt die Schlüsselverwaltung."),
    ("2024-03-19", "nl", 8, "De werkgroep stelt voor om de fietsenstalling naar de achterkant te verplaatsen. Er is discussie over de verlichting: twee leden vinden het daar te donker. Besluit: eerst een lamp, dan de rekken."),
    ("2024-04-16", "fr", 6, "On a reparlé du bruit. Les répétitions de la chorale finiront désormais à vingt et une heures trente, sauf la semaine du concert. Le boulanger remercie et offre des brioches."),
    ("2024-05-21", "pl", 11, "Zebranie rozpoczęto od minuty ciszy dla pana Wacława, który przez trzydzieści lat prowadził kronikę. Zeszyty trafią do biblioteki, a jego krzesło zostaje przy oknie."),
    ("2024-06-18", "uk", 8, "Обговорили літній табір. Бракує двох вожатих і одного великого казана. Олена запитає в сусідньому селі, а казан, можливо, позичить пожежна частина."),
    ("2024-07-16", "ja", 5, "夏祭りの準備について話し合った。提灯は去年のものを使い、破れた三つだけ張り替える。雨の場合は体育館を借りる。次回までに各班で当番表を作ること。"),
    ("2024-08-20", "ko", 6, "마을 도서관의 여름 운영 시간을 다시 정하였다. 평일에는 저녁 여덟 시까지, 토요일에는 정오까지 연다. 에어컨 수리비는 예비비에서 쓰기로 했다."),
    ("2024-09-17", "he", 7, "הוחלט לשפץ את גן השעשועים לפני חופשת החגים. שתי הצעות מחיר התקבלו, והשלישית תגיע בשבוע הבא. יש לסמן את השביל לעגלות ולהוסיף ספסל בצל."),
    ("2024-10-15", "hi", 10, "बैठक में तय हुआ कि तालाब की सफ़ाई दीवाली से पहले पूरी कर ली जाएगी। हर घर से एक व्यक्ति रविवार सुबह सात बजे आएगा। फावड़े और टोकरियाँ पंचायत भवन से मिलेंगी।"),
    ("2024-11-19", "th", 6, "ที่ประชุมเห็นชอบให้ซ่อมสะพานไม้หลังวัดก่อนฤดูน้ำหลาก ช่างประจำหมู่บ้านจะเป็นผู้ดูแล ส่วนค่าไม้ให้ใช้เงินกองกลาง"),
    ("2024-12-17", "en", 4, "No quorum. Those present ate the biscuits."),
]  # fmt: skip

LOGBOOK = """\
Logbook of the weather hut on the Rossegg, winter 1998

3 December. Arrived on skis with the second load. The stove draws well, the chimney cap is new. Snow at the stake 74 cm, loose on top. The barometer had stopped at some time in November; wound it and set it by the radio.

9 December. Wind all night from the north-west. The cups of the wind gauge iced up towards four, so the figure for the maximum is certainly too low. Dug out the door. Found a stoat living under the woodpile, who regards the woodpile as his.

14 December. Clear, minus nineteen at six. One could hear the church clock in the valley, which happens twice a winter.

21 December. Thaw and rain up to the hut, then frost. The slope behind is glazed, and crampons are needed to fetch water. I have moved the rope.

24 December. Two visitors with a lantern and a cake. Snow at the stake 121 cm.

31 December. Replaced the paper drum of the thermograph a few hours early, so that the year would fit onto it.
"""

FAQ = [
    ("en", "How do I extend a loan? Open the list of your loans and choose Extend. Books that somebody else has reserved cannot be extended, and the button is then missing rather than grey."),
    ("de", "Kann ich Bücher per Post zurückgeben? Ja. Bitte nicht als Päckchen ohne Beleg: Geht es verloren, müssen wir den Ersatz berechnen."),
    ("ru", "Можно ли прийти с собакой? Да, если собака небольшая и спит. В читальный зал на втором этаже животных не пускаем."),
    ("ar", "هل يمكنني استعارة الخرائط؟ الخرائط القديمة لا تُعار خارج المبنى، لكن يمكن تصويرها مجانًا في القاعة الصغيرة."),
    ("zh", "忘记密码怎么办？请带借书证到服务台，工作人员会当场为您重新设置。出于安全考虑，我们不通过电话办理。"),
    ("el", "Πόσα βιβλία μπορώ να δανειστώ; Έως οκτώ για τρεις εβδομάδες. Τα περιοδικά δεν μετρούν."),
    ("vi", "Thư viện có mở cửa vào ngày lễ không? Có, từ chín giờ đến mười hai giờ, nhưng chỉ phòng đọc ở tầng trệt."),
    ("ta", "நூலகத்தில் தமிழ்ப் புத்தகங்கள் உள்ளனவா? ஆம், முதல் மாடியில் இடது பக்கம் இரண்டு அலமாரிகள் உள்ளன. குழந்தைகளுக்கான கதைகள் கீழ்த் தளத்தில் கிடைக்கும்."),
]  # fmt: skip

HEATER = """\
# Stora värmaren i sjöboden

Värmaren går på fotogen och får bara användas när luckan mot sjön står på glänt.

1. Fyll tanken utomhus. Torka av spill innan du bär in den.
2. Vrid veken till märket, tänd med lång tändsticka och vänta tills lågan är jämn.
3. Sänk veken om glaset blir svart.

Släck **minst en kvart** innan du går, och känn på plåten med handryggen. Är den ännu varm så stannar du och dricker en kopp till.
"""

TRAVEL = (
    "Reisenotizen, dritter Tag\r\n\r\n"
    "Der Zug hielt auf freier Strecke, und niemand wunderte sich. Eine ältere Frau packte Äpfel aus und verteilte sie "
    "im ganzen Abteil; dafür bekam sie eine Zeitung, zwei Brötchen und meine Straßenkarte, auf der sie uns zeigte, wo "
    "früher die Grenze gewesen war.\r\n\r\n"
    "Abends in der Pension: Suppe, Regen, ein Klavier, dem das hohe F fehlt. Preis für die Nacht 34 €, mit Frühstück.\r\n"
)
LETTER = (
    "拝啓 桜の便りが聞かれる頃となりましたが、お変わりなくお過ごしでしょうか。\r\n"
    "先日お借りした自転車の本、たいへん面白く読みました。とくに峠の茶屋の話が気に入り、二度読み返したほどです。"
    "来月そちらへ伺う折にお返しいたします。\r\n敬具\r\n"
)
CAT = (
    "Kayıp kedi\n\n"
    "Dört yaşında, tekir, sol kulağının ucu kesik. Adı Pamuk ama çağırınca gelmez; mama kutusunun sesine gelir. En son "
    "pazartesi akşamı fırının arkasında görüldü. Gören olursa lütfen kapıcıya haber versin. Teşekkür ederiz.\n"
)


def json_lines(texts: list[tuple[str, str]]) -> bytes:
    lines = [
        json.dumps({"id": f"Q{number}", "lang": lang, "text": text}, ensure_ascii=False)
        for number, (lang, text) in enumerate(texts, 1)
    ]
    return ("\n".join(lines) + "\n").encode()


def zip_gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def minutes_table() -> pa.Table:
    held, lang, attendees, text = zip(*MINUTES, strict=True)
    return pa.table(
        {
            "held": pa.array([datetime.date.fromisoformat(day) for day in held]),
            "lang": pa.array(lang).dictionary_encode(),
            "attendees": pa.array(attendees, pa.int16()),
            "text": pa.array(text),
        }
    )


def parquet(table: pa.Table, **options: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def documents() -> dict[str, bytes]:
    return {
        "minutes.parquet": parquet(minutes_table(), row_group_size=5, compression="zstd"),
        "archive/logbook 1998.txt.gz": zip_gzip(LOGBOOK.encode()),
        "archive/faq.jsonl.bz2": bz2.compress(json_lines(FAQ)),
        "archive/värmare.md.zst": zstandard.ZstdCompressor().compress(HEATER.encode()),
        "windows/Reisenotizen.txt": codecs.BOM_UTF16_LE + TRAVEL.encode("utf-16-le"),
        "windows/手紙.txt": codecs.BOM_UTF16_BE + LETTER.encode("utf-16-be"),
        "windows/kayıp kedi.txt": codecs.BOM_UTF8 + CAT.encode(),
    }


def record(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def broken() -> dict[str, bytes]:
    """Each file's name begins with the reason that reading it fails with; files of lines hold a good line before and after."""
    good = [
        record(id=f"good {number}", text=f"Line {number} is as it should be.") for number in (1, 2)
    ]

    def around(*lines: bytes) -> bytes:
        return b"\n".join([good[0], *lines, good[1]]) + b"\n"

    table = pa.table({"text": [f"Row {number} of a table." for number in range(50)]})
    whole = parquet(table, row_group_size=25)
    page = pq.read_metadata(io.BytesIO(whole)).row_group(1).column(0).data_page_offset
    many = b"".join(record(text=f"Record {number} of many.") + b"\n" for number in range(200))
    return {
        "undecodable_text.txt": "Größe und Maß in Latin-1".encode("latin-1"),
        "undecodable_text-utf16.txt": codecs.BOM_UTF16_LE + "cut in two".encode("utf-16-le")[:-1],
        "empty.txt": b"",
        "empty-after-mark.txt": codecs.BOM_UTF8,
        "whitespace_only.txt": " \n\t\u3000\r\n".encode(),
        "nul_bytes.txt": b"The text stops here.\0\0\0\0 And goes on.",
        "nul_bytes-utf16-without-mark.txt": "No mark at all".encode("utf-16-le"),
        "unsupported_format.docx": b"PK\x03\x04 not a document that is read yet",
        "invalid_json.jsonl": around(b'{"text": "no end'),
        "invalid_json-nan.jsonl": around(b'{"text": "a number that is none", "score": NaN}'),
        "invalid_json-surrogate.jsonl": around(b'{"text": "half a pair \\ud800"}'),
        "invalid_json-two-values.jsonl": around(b'{"text": "one"} {"text": "two"}'),
        "undecodable_text.jsonl": around(b'{"text": "Stra\xdfe"}'),
        "not_an_object.jsonl": around(b'["text", "in a list"]'),
        "missing_text_field.jsonl": around(record(id=3, body="The field has another name.")),
        "text_not_string.jsonl": around(record(id=3, text=42)),
        "text_not_string-null.jsonl": around(record(id=3, text=None)),
        "repeated_field.jsonl": around(b'{"text": "first", "text": "second"}'),
        "empty.jsonl": around(record(id=3, text="")),
        "whitespace_only.jsonl": around(record(id=3, text=" \u2003\n")),
        "nul_bytes.jsonl": around(record(id=3, text="a\0b")),
        "repeated_id.jsonl": around(
            record(id="good 1", text="The same id again.")
        ),  # with --id-field id
        "missing_id.jsonl": around(record(text="No id.")),  # with --id-field id
        "bad_id.jsonl": around(record(id=1.5, text="A fraction as id.")),  # with --id-field id
        "truncated_object.txt.gz": zip_gzip(LOGBOOK.encode())[:-40],
        "truncated_object.jsonl.gz": zip_gzip(many)[:-60],
        "truncated_object.jsonl.bz2": bz2.compress(many)[:-60],
        "truncated_object.jsonl.zst": zstandard.ZstdCompressor().compress(many)[:-3],
        "truncated_object-empty.jsonl.gz": b"",
        "corrupt_object-trailing.jsonl.gz": zip_gzip(around()) + b"something else",
        "not_parquet-truncated.parquet": whole[: len(whole) // 2],
        "not_parquet.parquet": b"This is a text with another name.",
        "corrupt_object.parquet": whole[:page] + b"\xff" * 40 + whole[page + 40 :],
        "missing_text_field.parquet": parquet(pa.table({"body": ["The column has another name."]})),
        "text_not_string.parquet": parquet(pa.table({"text": [1, 2]})),
        "text_not_string-null.parquet": parquet(pa.table({"text": ["A good row.", None]})),
    }


def main() -> None:
    for folder, files in (("documents", documents()), ("broken", broken())):
        for name, data in files.items():
            path = HERE / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    main()
