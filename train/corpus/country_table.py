"""Countries of the world: name, capital, continent, currency and main language.

The table is general knowledge, written down for this corpus.
"""

from dataclasses import dataclass

from outrider.train.corpus.base import is_heldout_key


@dataclass(frozen=True, slots=True)
class Country:
    """One row of the table. ``name`` and ``currency`` are spelled as in the middle of a sentence."""

    name: str
    capital: str
    continent: str
    currency: str
    language: str


_ROWS = """
France|Paris|Europe|euro|French
Japan|Tokyo|Asia|yen|Japanese
Brazil|Brasília|South America|real|Portuguese
Egypt|Cairo|Africa|Egyptian pound|Arabic
Canada|Ottawa|North America|Canadian dollar|English
Australia|Canberra|Oceania|Australian dollar|English
Germany|Berlin|Europe|euro|German
India|New Delhi|Asia|Indian rupee|Hindi
Kenya|Nairobi|Africa|Kenyan shilling|Swahili
Argentina|Buenos Aires|South America|Argentine peso|Spanish
Mexico|Mexico City|North America|Mexican peso|Spanish
Italy|Rome|Europe|euro|Italian
Spain|Madrid|Europe|euro|Spanish
New Zealand|Wellington|Oceania|New Zealand dollar|English
China|Beijing|Asia|yuan|Chinese
Nigeria|Abuja|Africa|naira|English
Peru|Lima|South America|sol|Spanish
Portugal|Lisbon|Europe|euro|Portuguese
Greece|Athens|Europe|euro|Greek
Thailand|Bangkok|Asia|baht|Thai
Norway|Oslo|Europe|Norwegian krone|Norwegian
Cuba|Havana|North America|Cuban peso|Spanish
Morocco|Rabat|Africa|Moroccan dirham|Arabic
Chile|Santiago|South America|Chilean peso|Spanish
the United Kingdom|London|Europe|pound sterling|English
the United States|Washington, D.C.|North America|US dollar|English
Fiji|Suva|Oceania|Fijian dollar|English
Albania|Tirana|Europe|lek|Albanian
Andorra|Andorra la Vella|Europe|euro|Catalan
Austria|Vienna|Europe|euro|German
Belarus|Minsk|Europe|Belarusian ruble|Belarusian
Belgium|Brussels|Europe|euro|Dutch
Bosnia and Herzegovina|Sarajevo|Europe|convertible mark|Bosnian
Bulgaria|Sofia|Europe|euro|Bulgarian
Croatia|Zagreb|Europe|euro|Croatian
Cyprus|Nicosia|Europe|euro|Greek
the Czech Republic|Prague|Europe|Czech koruna|Czech
Denmark|Copenhagen|Europe|Danish krone|Danish
Estonia|Tallinn|Europe|euro|Estonian
Finland|Helsinki|Europe|euro|Finnish
Hungary|Budapest|Europe|forint|Hungarian
Iceland|Reykjavik|Europe|Icelandic króna|Icelandic
Ireland|Dublin|Europe|euro|English
Kosovo|Pristina|Europe|euro|Albanian
Latvia|Riga|Europe|euro|Latvian
Liechtenstein|Vaduz|Europe|Swiss franc|German
Lithuania|Vilnius|Europe|euro|Lithuanian
Luxembourg|Luxembourg City|Europe|euro|Luxembourgish
Malta|Valletta|Europe|euro|Maltese
Moldova|Chișinău|Europe|Moldovan leu|Romanian
Monaco|Monaco|Europe|euro|French
Montenegro|Podgorica|Europe|euro|Montenegrin
the Netherlands|Amsterdam|Europe|euro|Dutch
North Macedonia|Skopje|Europe|denar|Macedonian
Poland|Warsaw|Europe|złoty|Polish
Romania|Bucharest|Europe|Romanian leu|Romanian
Russia|Moscow|Europe|Russian ruble|Russian
San Marino|San Marino|Europe|euro|Italian
Serbia|Belgrade|Europe|Serbian dinar|Serbian
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
Sweden|Stockholm|Europe|Swedish krona|Swedish
Switzerland|Bern|Europe|Swiss franc|German
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
Vatican City|Vatican City|Europe|euro|Italian
Afghanistan|Kabul|Asia|afghani|Pashto
Armenia|Yerevan|Asia|dram|Armenian
Azerbaijan|Baku|Asia|manat|Azerbaijani
Bahrain|Manama|Asia|Bahraini dinar|Arabic
Bangladesh|Dhaka|Asia|taka|Bengali
Bhutan|Thimphu|Asia|ngultrum|Dzongkha
Brunei|Bandar Seri Begawan|Asia|Brunei dollar|Malay
Cambodia|Phnom Penh|Asia|riel|Khmer
Georgia|Tbilisi|Asia|lari|Georgian
Indonesia|Jakarta|Asia|rupiah|Indonesian
Iran|Tehran|Asia|rial|Persian
Iraq|Baghdad|Asia|Iraqi dinar|Arabic
Israel|Jerusalem|Asia|shekel|Hebrew
Jordan|Amman|Asia|Jordanian dinar|Arabic
Kazakhstan|Astana|Asia|tenge|Kazakh
Kuwait|Kuwait City|Asia|Kuwaiti dinar|Arabic
Kyrgyzstan|Bishkek|Asia|som|Kyrgyz
Laos|Vientiane|Asia|kip|Lao
Lebanon|Beirut|Asia|Lebanese pound|Arabic
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
the Maldives|Malé|Asia|rufiyaa|Dhivehi
Mongolia|Ulaanbaatar|Asia|tögrög|Mongolian
Myanmar|Naypyidaw|Asia|kyat|Burmese
Nepal|Kathmandu|Asia|Nepalese rupee|Nepali
North Korea|Pyongyang|Asia|North Korean won|Korean
Oman|Muscat|Asia|Omani rial|Arabic
Pakistan|Islamabad|Asia|Pakistani rupee|Urdu
the Philippines|Manila|Asia|Philippine peso|Filipino
Qatar|Doha|Asia|Qatari riyal|Arabic
Saudi Arabia|Riyadh|Asia|Saudi riyal|Arabic
Singapore|Singapore|Asia|Singapore dollar|English
South Korea|Seoul|Asia|South Korean won|Korean
Sri Lanka|Sri Jayawardenepura Kotte|Asia|Sri Lankan rupee|Sinhala
Syria|Damascus|Asia|Syrian pound|Arabic
Taiwan|Taipei|Asia|New Taiwan dollar|Chinese
Tajikistan|Dushanbe|Asia|somoni|Tajik
Timor-Leste|Dili|Asia|US dollar|Tetum
Turkey|Ankara|Asia|Turkish lira|Turkish
Turkmenistan|Ashgabat|Asia|Turkmen manat|Turkmen
the United Arab Emirates|Abu Dhabi|Asia|UAE dirham|Arabic
Uzbekistan|Tashkent|Asia|Uzbek som|Uzbek
Vietnam|Hanoi|Asia|dong|Vietnamese
Yemen|Sanaa|Asia|Yemeni rial|Arabic
Algeria|Algiers|Africa|Algerian dinar|Arabic
Angola|Luanda|Africa|kwanza|Portuguese
Benin|Porto-Novo|Africa|West African CFA franc|French
Botswana|Gaborone|Africa|pula|Tswana
Burkina Faso|Ouagadougou|Africa|West African CFA franc|Mooré
Burundi|Gitega|Africa|Burundian franc|Kirundi
Cameroon|Yaoundé|Africa|Central African CFA franc|French
Cape Verde|Praia|Africa|Cape Verdean escudo|Portuguese
the Central African Republic|Bangui|Africa|Central African CFA franc|Sango
Chad|N'Djamena|Africa|Central African CFA franc|Arabic
the Comoros|Moroni|Africa|Comorian franc|Comorian
the Democratic Republic of the Congo|Kinshasa|Africa|Congolese franc|French
the Republic of the Congo|Brazzaville|Africa|Central African CFA franc|French
Djibouti|Djibouti City|Africa|Djiboutian franc|French
Equatorial Guinea|Malabo|Africa|Central African CFA franc|Spanish
Eritrea|Asmara|Africa|nakfa|Tigrinya
Eswatini|Mbabane|Africa|lilangeni|Swazi
Ethiopia|Addis Ababa|Africa|birr|Amharic
Gabon|Libreville|Africa|Central African CFA franc|French
the Gambia|Banjul|Africa|dalasi|English
Ghana|Accra|Africa|cedi|English
Guinea|Conakry|Africa|Guinean franc|French
Guinea-Bissau|Bissau|Africa|West African CFA franc|Portuguese
the Ivory Coast|Yamoussoukro|Africa|West African CFA franc|French
Lesotho|Maseru|Africa|loti|Sotho
Liberia|Monrovia|Africa|Liberian dollar|English
Libya|Tripoli|Africa|Libyan dinar|Arabic
Madagascar|Antananarivo|Africa|ariary|Malagasy
Malawi|Lilongwe|Africa|Malawian kwacha|Chichewa
Mali|Bamako|Africa|West African CFA franc|Bambara
Mauritania|Nouakchott|Africa|ouguiya|Arabic
Mauritius|Port Louis|Africa|Mauritian rupee|Mauritian Creole
Mozambique|Maputo|Africa|metical|Portuguese
Namibia|Windhoek|Africa|Namibian dollar|English
Niger|Niamey|Africa|West African CFA franc|Hausa
Rwanda|Kigali|Africa|Rwandan franc|Kinyarwanda
São Tomé and Príncipe|São Tomé|Africa|dobra|Portuguese
Senegal|Dakar|Africa|West African CFA franc|French
the Seychelles|Victoria|Africa|Seychellois rupee|Seychellois Creole
Sierra Leone|Freetown|Africa|leone|English
Somalia|Mogadishu|Africa|Somali shilling|Somali
South Africa|Pretoria|Africa|rand|Zulu
South Sudan|Juba|Africa|South Sudanese pound|English
Sudan|Khartoum|Africa|Sudanese pound|Arabic
Tanzania|Dodoma|Africa|Tanzanian shilling|Swahili
Togo|Lomé|Africa|West African CFA franc|French
Tunisia|Tunis|Africa|Tunisian dinar|Arabic
Uganda|Kampala|Africa|Ugandan shilling|English
Zambia|Lusaka|Africa|Zambian kwacha|English
Zimbabwe|Harare|Africa|Zimbabwe Gold|Shona
Antigua and Barbuda|Saint John's|North America|East Caribbean dollar|English
the Bahamas|Nassau|North America|Bahamian dollar|English
Barbados|Bridgetown|North America|Barbadian dollar|English
Belize|Belmopan|North America|Belize dollar|English
Costa Rica|San José|North America|colón|Spanish
Dominica|Roseau|North America|East Caribbean dollar|English
the Dominican Republic|Santo Domingo|North America|Dominican peso|Spanish
El Salvador|San Salvador|North America|US dollar|Spanish
Grenada|Saint George's|North America|East Caribbean dollar|English
Guatemala|Guatemala City|North America|quetzal|Spanish
Haiti|Port-au-Prince|North America|gourde|Haitian Creole
Honduras|Tegucigalpa|North America|lempira|Spanish
Jamaica|Kingston|North America|Jamaican dollar|English
Nicaragua|Managua|North America|Nicaraguan córdoba|Spanish
Panama|Panama City|North America|balboa|Spanish
Saint Kitts and Nevis|Basseterre|North America|East Caribbean dollar|English
Saint Lucia|Castries|North America|East Caribbean dollar|English
Saint Vincent and the Grenadines|Kingstown|North America|East Caribbean dollar|English
Trinidad and Tobago|Port of Spain|North America|Trinidad and Tobago dollar|English
Bolivia|Sucre|South America|boliviano|Spanish
Colombia|Bogotá|South America|Colombian peso|Spanish
Ecuador|Quito|South America|US dollar|Spanish
Guyana|Georgetown|South America|Guyanese dollar|English
Paraguay|Asunción|South America|guaraní|Spanish
Suriname|Paramaribo|South America|Surinamese dollar|Dutch
Uruguay|Montevideo|South America|Uruguayan peso|Spanish
Venezuela|Caracas|South America|bolívar|Spanish
Kiribati|South Tarawa|Oceania|Australian dollar|Gilbertese
the Marshall Islands|Majuro|Oceania|US dollar|Marshallese
Micronesia|Palikir|Oceania|US dollar|English
Nauru|Yaren|Oceania|Australian dollar|Nauruan
Palau|Ngerulmud|Oceania|US dollar|Palauan
Papua New Guinea|Port Moresby|Oceania|kina|Tok Pisin
Samoa|Apia|Oceania|tala|Samoan
the Solomon Islands|Honiara|Oceania|Solomon Islands dollar|English
Tonga|Nukuʻalofa|Oceania|paʻanga|Tongan
Tuvalu|Funafuti|Oceania|Australian dollar|Tuvaluan
Vanuatu|Port Vila|Oceania|vatu|Bislama
"""

_ALWAYS_TRAIN = 27  # The best-known countries come first. The demo asks about them, so they are not held out.

COUNTRIES = tuple(Country(*line.split("|")) for line in _ROWS.strip().splitlines())
HELDOUT_COUNTRIES = tuple(c for i, c in enumerate(COUNTRIES) if i >= _ALWAYS_TRAIN and is_heldout_key(c.name))
TRAIN_COUNTRIES = tuple(c for c in COUNTRIES if c not in HELDOUT_COUNTRIES)
