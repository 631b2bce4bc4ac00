// What the server says about itself: its views, folders, position schemes, and the kinds of other parts.

import { get } from "./api.js";

export const about = await get("/api/about");
