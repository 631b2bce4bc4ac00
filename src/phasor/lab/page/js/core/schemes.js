// The position schemes that the server knows, in the language of the page.

/** The schemes as { kind, name, headline, about, acts_on, axes, fields, … }; those together that act in the same places. */
export const listSchemes = ({ about, language }) => about.schemes.map(({ texts, ...scheme }) => ({ ...scheme, ...texts[language] }));

/** Where a scheme acts, in words. */
export const describePlaces = ({ acts_on: places }, t) => (places.length ? places.map((place) => t(`place.${place}`)).join(t("comma")) : t("place.none"));

/** The options of a select control, in groups by where schemes act. */
export const schemeOptions = (schemes, t) => schemes.map((scheme) => [scheme.kind, scheme.name, describePlaces(scheme, t)]);
